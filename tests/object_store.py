"""A store of objects in memory, as fsspec's packages show one, which fails on demand.

An object appears whole when its file is closed. There are no folders, and nothing can be renamed or appended to.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

Hook = Callable[[str, str], None]


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """`objects://BUCKET/...`; the bucket `mine` is there."""

    protocol = "objects"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    before: ClassVar[Hook] = staticmethod(lambda operation, path: None)
    """Called before each `read`, `list`, `write`, `copy` and `remove`; what it raises is the store's answer."""
    taken: ClassVar[Callable[[str, bytes], bytes]] = staticmethod(lambda path, data: data)
    """What the store keeps of the bytes that it is given."""
    room: ClassVar[float] = float("inf")
    """Bytes for which it has room."""

    @classmethod
    def begin(cls) -> None:
        """Empty it, and let nothing fail."""
        cls.objects.clear()
        cls.before = staticmethod(lambda operation, path: None)
        cls.taken = staticmethod(lambda path, data: data)
        cls.room = float("inf")
        fsspec.register_implementation("objects", cls, clobber=True)

    def keep(self, path: str, data: bytes) -> None:
        if path.split("/")[0] != "mine":
            raise FileNotFoundError(errno.ENOENT, "no such bucket", path)
        if sum(map(len, self.objects.values())) + len(data) > type(self).room:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        self.objects[path] = type(self).taken(path, data)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        type(self).before("list", path)
        path = self._strip_protocol(path).rstrip("/")
        found: dict[str, dict[str, Any]] = {}
        for name, data in self.objects.items():
            if name == path:
                found[name] = {"name": name, "size": len(data), "type": "file"}
            elif name.startswith(f"{path}/"):
                rest = name[len(path) + 1 :]
                child = f"{path}/{rest.partition('/')[0]}"
                kind = "directory" if "/" in rest else "file"
                found[child] = {"name": child, "size": 0 if kind == "directory" else len(data), "type": kind}
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return list(found.values()) if detail else sorted(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        entries = self.ls(path)
        own = [entry for entry in entries if entry["name"] == path]
        return own[0] if own else {"name": path, "size": 0, "type": "directory"}

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        type(self).before("copy", path1)
        self.keep(self._strip_protocol(path2), self.objects[self._strip_protocol(path1)])

    def _rm(self, path: str) -> None:
        type(self).before("remove", path)
        if self._strip_protocol(path) not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        del self.objects[self._strip_protocol(path)]

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        names = [name for name in self.objects if name == path or (recursive and name.startswith(f"{path}/"))]
        if not names:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        for name in names:
            self._rm(name)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Object(self, path, mode, **options) if mode == "wb" else self._reader(path)

    def _reader(self, path: str) -> Any:
        if path not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return _Reader(path)


class _Reader(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__(ObjectStore.objects[path])
        self._path = path
        self.size = len(self.getbuffer())

    def read(self, size: int | None = -1) -> bytes:
        ObjectStore.before("read", self._path)
        return super().read(size)


class _Object(AbstractBufferedFile):  # type: ignore[misc]  # fsspec is untyped
    """An object that is being sent."""

    def _initiate_upload(self) -> None:
        self.sent = bytearray()

    def _upload_chunk(self, final: bool = False) -> bool:
        ObjectStore.before("write", self.path)
        self.sent += self.buffer.getvalue()
        if final:
            self.fs.keep(self.path, bytes(self.sent))
        return True
