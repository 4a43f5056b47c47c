"""Reads files of `torch.save` as values, and vets the files that ranks unpickle by themselves.

A file of `torch.save` is a zip archive of one pickle and the bytes of its tensors, all uncompressed. torch reads it
with another library than Python's, so an archive that two libraries can understand differently is refused: compressed,
repeated or unknown entries, anything before or after it, more bytes than its file has.

The ranks of Megatron-LM unpickle `.metadata`, `common.pt`, objects in `*.distcp` and `mp_rank_*/*.pt` by themselves.
`vet_checkpoint` reads all these pickles first, and refuses names that neither torch nor Megatron-LM writes.
"""

from __future__ import annotations

import ast
import encodings.cp437  # noqa: F401 (zipfile would import it for some archives, and a file may import nothing)
import io
import math
import os
import re
import signal
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from relayrun.control.trainers.pickle_records import (
    MALFORMED,
    MOST_DEEP,
    CorruptPickle,
    PersistentId,
    PickledCall,
    PickledName,
    RefusedPickle,
    check_key,
    is_call_of,
    read_records,
    read_several,
)
from relayrun.errors import InputError

METADATA_FILE = ".metadata"
MOST_BYTES = 1 << 28
"""Largest file that is read as values; arguments and a schedule take a few kilobytes."""
MOST_PICKLE = 1 << 24
"""Largest pickle in a file; tensors are stored outside it."""
MOST_METADATA = 1 << 26
"""Largest `.metadata`; it has about 150 bytes for each block."""
SAVED_FACTOR = 16
"""Factor of the bounds of a `.metadata` with the hash that its run recorded: of two million blocks."""
MOST_VALUES = 1 << 20
"""Values in a file; a value that is named again is counted again."""
MOST_TEXT = 1 << 24
"""Characters of all texts in a file, counted likewise."""

_ENTRY = re.compile(
    r"[^/]+/(data\.pkl|byteorder|version|data/\d+|\.(data/serialization_id|format_version|storage_alignment))"
)
_STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "BFloat16Storage": ("bfloat16", 2),
    "HalfStorage": ("float16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}
"""Type of the numbers, and bytes of each."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as bytes, without torch."""

    dtype: str
    """Such as `float32`."""
    shape: tuple[int, ...]
    data: bytes | memoryview = field(repr=False)
    """Values in row-major order; empty for a view of another layout."""


class _Archive:
    """The archive in a file. Raises CorruptPickle."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, size = file, file.seek(0, os.SEEK_END)
        self._check_ends(file, size)
        self._zip = zipfile.ZipFile(file)
        entries = self._zip.infolist()
        names = {each.filename.lower() for each in entries}
        roots = {each.filename.partition("/")[0] for each in entries}
        plain = all(not each.compress_type and each.orig_filename == each.filename for each in entries)
        if not plain or len(names) < len(entries) or len(roots) != 1 or not all(map(_ENTRY.fullmatch, names)):
            raise RefusedPickle("its archive is not as torch.save writes it")
        if sum(each.file_size for each in entries) > size:
            raise RefusedPickle("its archive claims more bytes than its file has")
        self._root = roots.pop()
        self._storages: dict[str, bytes] = {}

    @staticmethod
    def _check_ends(file: BinaryIO, size: int) -> None:
        """Refuse an archive with a directory that two programs find at different places."""
        file.seek(0)
        begin = file.read(4)
        file.seek(max(0, size - 98))
        tail = file.read().rjust(98, b"\0")
        if begin != b"PK\3\4" or tail[76:80] != b"PK\5\6" or tail[96:] != b"\0\0":
            raise CorruptPickle("it is no file of torch.save")
        length, begins = struct.unpack("<II", tail[88:96])
        end = size - 22
        if tail[56:60] == b"PK\6\7":
            end = size - 98
            (at,) = struct.unpack("<Q", tail[64:72])
            length, begins = struct.unpack("<QQ", tail[40:56])
            if at != end or tail[:4] != b"PK\6\6":
                raise RefusedPickle("its archive has two directories")
        if begins + length != end:
            raise RefusedPickle("its archive has two directories")

    def pickle(self) -> bytes:
        """Return the pickle."""
        return self._read("data.pkl", MOST_PICKLE)

    def storage(self, key: str) -> bytes:
        """Return the bytes of a storage; each is read once."""
        if key not in self._storages:
            self._storages[key] = self._read(f"data/{key}", MOST_BYTES)
        return self._storages[key]

    def _read(self, name: str, most: int) -> bytes:
        entry = self._zip.getinfo(f"{self._root}/{name}")
        if entry.file_size > most:
            raise RefusedPickle(f"its {name} has more than {most} bytes")
        self._file.seek(entry.header_offset + 26)  # without zipfile, since torch's writer may leave checksums out
        self._file.seek(sum(struct.unpack("<HH", self._file.read(4))), os.SEEK_CUR)
        return self._file.read(entry.file_size)


def read_torch_file(data: bytes) -> Any:
    """Return the content of a file of `torch.save`: values, StoredTensor, a Namespace of arguments, and records of all
    other objects. Raises CorruptPickle."""
    if len(data) > MOST_BYTES:
        raise RefusedPickle(f"it has more than {MOST_BYTES} bytes")
    with _malformed():
        archive = _Archive(io.BytesIO(data))
        return _Values(archive).of(read_records(archive.pickle(), MOST_BYTES)[0])


@contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except CorruptPickle:
        raise
    except (*MALFORMED, EOFError, zipfile.BadZipFile) as error:
        raise CorruptPickle(f"it is no file of torch.save: {type(error).__name__}: {str(error)[:200]}") from None


class _Values:
    """Turns the records of one file into values."""

    def __init__(self, archive: _Archive) -> None:
        self._archive = archive
        self._values, self._text = MOST_VALUES, MOST_TEXT
        self._open: dict[int, Any] = {}
        """Containers and records around the value, by the id of their source: a value may hold itself."""

    def of(self, found: Any) -> Any:
        """Return the value of a part of the file."""
        self._values -= 1
        if isinstance(found, (str, bytes)):
            self._text -= len(found)
        if self._values < 0 or self._text < 0 or len(self._open) > MOST_DEEP:
            raise RefusedPickle("its values lie in one another without end")
        if id(found) in self._open:
            return self._open[id(found)]
        if not isinstance(found, (list, tuple, dict, PickledCall)):
            return found
        try:
            return self._filled(found)
        finally:
            self._open.pop(id(found), None)

    def _filled(self, found: Any) -> Any:
        if isinstance(found, PickledCall):
            return self._called(found)
        made: Any = [] if isinstance(found, (list, tuple)) else {}
        self._open[id(found)] = made
        if isinstance(found, dict):
            made.update((self.of(key), self.of(value)) for key, value in found.items())
            return made
        made += [self.of(each) for each in found]
        return tuple(made) if isinstance(found, tuple) else made

    def _called(self, call: PickledCall) -> Any:
        if is_call_of(call, "torch._utils._rebuild_tensor_v2") and _has_known_type(*call.arguments[:1]):
            return self._tensor(*call.arguments)
        made: Any = Namespace() if is_call_of(call, "argparse.Namespace") else PickledCall(call.function, ())
        self._open[id(call)] = made
        arguments: tuple[Any, ...] = self.of(call.arguments)
        items, state = self.of([*call.items]), self.of(call.state)
        if isinstance(made, Namespace):
            if not isinstance(state, (dict, NoneType)) or not all(isinstance(name, str) for name in state or ()):
                raise CorruptPickle("it has arguments without a name")
            vars(made).update(state or {})
            return made
        if (make := _MAKERS.get(str(call.function))) is not None and state is None:
            return make(items) if make is _ordered else make(*arguments)
        made.arguments, made.items, made.state = arguments, items, state
        return made

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
        shape = size.arguments[0] if is_call_of(size, "torch.Size") else size
        kind, name, key, *_ = storage.value
        dtype, item = _STORAGES[name.name]
        numbers = isinstance(shape, tuple) and all(type(each) is int and each >= 0 for each in (offset, *shape))
        if kind != "storage" or not numbers or not str(key).isdecimal() or len(shape) > MOST_DEEP:
            raise CorruptPickle("it holds a tensor of another form than torch's")
        count = math.prod(shape)
        if count * item > MOST_BYTES:
            raise RefusedPickle(f"it holds a tensor of more than {MOST_BYTES} bytes")
        wanted = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        plain = wanted == stride or count <= 1
        data = memoryview(self._archive.storage(str(key)))[offset * item : (offset + count) * item]
        if plain and len(data) != count * item:
            raise CorruptPickle("it holds a tensor that is larger than its bytes")
        return StoredTensor(dtype=dtype, shape=shape, data=data if plain else b"")


def _has_known_type(storage: Any = None) -> bool:
    value = storage.value if isinstance(storage, PersistentId) and isinstance(storage.value, tuple) else ()
    return len(value) > 2 and isinstance(value[1], PickledName) and value[1].name in _STORAGES


def _set(items: Iterable[Any] = ()) -> set[Any]:
    items = [*items]
    for item in items:
        check_key(item)
    return set(items)


def _ordered(items: list[Any]) -> OrderedDict[Any, Any]:
    for key, _ in items:
        check_key(key)
    return OrderedDict(items)


_MAKERS: dict[str, Callable[..., Any]] = {"collections.OrderedDict": _ordered}
for _module in ("builtins", "__builtin__"):
    _MAKERS |= {f"{_module}.slice": slice, f"{_module}.set": _set}
    _MAKERS[f"{_module}.frozenset"] = lambda items: frozenset(_set(items))


MEGATRON_METADATA = "megatron.core.dist_checkpointing.strategies.torch"
_DCP = "torch.distributed.checkpoint."
_TENSOR = _DCP + "metadata.TensorStorageMetadata"
METADATA_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    _DCP + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    _DCP + "metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    _DCP + "planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    MEGATRON_METADATA: {"MCoreMetadata", "MCoreSavePlan"},
}
"""Names in `.metadata`, besides those of torch's types of numbers and layouts: records of values and their
constructors. Megatron-LM's checkpoints contain records of the planner."""
_KINDS = re.compile(r"(b?float|u?int|complex)\d+(_e\dm\d(fn)?(uz)?)?|bool|device|strided|(Untyped|\w+)Storage")
"""Types of numbers and of storages in torch."""
PACKED = "_extra_state"
"""End of the key of an object in whose bytes TransformerEngine packs a pickle."""
MOST_PACKED = 4
"""Deepest nesting of pickles in bytes."""
_LOAD_FROM_BYTES = "torch.storage._load_from_bytes"
_BUFFER = "_io.BytesIO"
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", _BUFFER)
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""The first of the five pickles that begin a file of `torch.save` in its old format."""
_BUILTINS = {"getattr", "set", "frozenset", "slice", "complex"}
_ARRAYS = {"_reconstruct", "scalar"}
_OBJECT_NAMES = {
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
    "signal": {"Signals", *signal.Signals.__members__},  # an older Python names the constant
    "transformer_engine.common.recipe": {
        *("DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
        *("Format", "_FormatHelper", "MMParams", "QParams", "_OverrideLinearPrecision"),
    },
    "_io": {"BytesIO"},
    "_codecs": {"encode"},
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": _ARRAYS,
    "numpy._core.multiarray": _ARRAYS,
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"},
    "megatron.core.enums": {"Fp4Recipe", "Fp8Recipe", "ModelType"},
    "megatron.core.transformer.enums": {"AttnBackend", "AttnMaskType", "AttnType", "CudaGraphScope", "LayerType"},
    "megatron.core.rerun_state_machine": {"RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"},
    "megatron.core.optimizer.optimizer_config": {"OptimizerConfig"},
}
"""More names that torch and Megatron-LM write into objects: values, enumerations, and types of numbers."""


def vet_checkpoint(folder: Path, *, checkout: Path | None = None) -> None:
    """Raise InputError if ranks that unpickle this checkpoint would import or call anything besides values.

    `checkout`: folder from which the ranks import; its enumerations and records of plain fields are values, too. Raises
    OSError.
    """
    file = METADATA_FILE
    try:
        for name, read in _pickles(folder):
            file = name
            other = [str(name) for name in read() if not _is_value(name, checkout)]
            if other:
                raise RefusedPickle(f"it names {', '.join(other[:3])}, which neither torch nor Megatron-LM writes")
    except MALFORMED as error:
        raise InputError(
            f"this checkpoint is not loaded: {file}: {error}",
            where=folder,
            hint="ranks of Megatron-LM run what it names; take a checkpoint from a source that you know",
        ) from None


def _pickles(folder: Path) -> Iterator[tuple[str, Callable[[], list[PickledName]]]]:
    """Yield the name of each file with a pickle, and what reads its names."""
    if (folder / METADATA_FILE).is_file():
        records, names = read_records(read_bounded(folder / METADATA_FILE))
        yield METADATA_FILE, lambda: names
        for key, name, offset, length in tensor_blocks(records, others=True):
            yield name, partial(_names_in_block, folder / name, offset, length, packed=PACKED in key)
    for path in sorted(path for path in folder.rglob("*.pt") if path.is_file()):
        with path.open("rb") as file:
            yield str(path.relative_to(folder)), partial(names_in_torch_file, file)


def _names_in_block(path: Path, offset: int, length: int, *, packed: bool) -> list[PickledName]:
    with path.open("rb") as file:
        file.seek(offset)
        return names_in_torch_file(io.BytesIO(file.read(min(length, MOST_BYTES))), packed=packed)


def names_in_torch_file(file: BinaryIO, *, packed: bool = False, deep: int = 0) -> list[PickledName]:
    """Return all names in the pickle of a file of `torch.save`, and in the pickles that TransformerEngine packs into
    bytes: those of `_extra_state`, or with `packed` all. Raises CorruptPickle."""
    with _malformed():
        archive = _Archive(file)
        records, names = read_records(archive.pickle(), MOST_BYTES)
        for record in _packed_records(records, _TENSORS, packed=packed):
            names += _names_in_bytes(_bytes_of(_Values(archive).of(record)), deep + 1)
        return names


def _packed_records(records: Any, kinds: Collection[str], *, packed: bool) -> Iterator[PickledCall]:
    """Yield the tensors and buffers that the ranks unpickle in a second step."""
    todo, seen = [(records, packed)], set()
    while todo:
        value, packed = todo.pop()
        if not isinstance(value, (list, tuple, dict, PickledCall)) or (id(value), packed) in seen:
            continue
        seen.add((id(value), packed))
        if packed and isinstance(value, PickledCall) and str(value.function) in kinds:
            yield value
            continue
        named = [*value.items()] if isinstance(value, dict) else []
        if isinstance(value, PickledCall):
            named += [each for each in value.items if isinstance(each, tuple) and len(each) == 2]
            todo += [(each, packed) for each in (value.arguments, value.state, value.items)]
        todo += [(each, packed or str(key).endswith(PACKED)) for key, each in named]
        todo += [(each, packed) for each in value] if isinstance(value, (list, tuple)) else []


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of a tensor, or of a buffer, which a call or a state fills. Raises RefusedPickle."""
    if isinstance(value, StoredTensor) and (len(value.data) or not math.prod(value.shape)):
        return bytes(value.data)
    if is_call_of(value, _BUFFER, _LOAD_FROM_BYTES):
        found = next(iter(value.state or value.arguments or [b""]))
        if is_call_of(found, "_codecs.encode") and found.arguments[1:] == ("latin1",):
            return str(found.arguments[0]).encode("latin1")
        if isinstance(found, bytes):
            return found
    raise RefusedPickle("it packs a state in another form than TransformerEngine's")


def _names_in_bytes(data: bytes, deep: int) -> list[PickledName]:
    """Return all names in a pickle, in a file of `torch.save` of either format, and in the bytes inside."""
    if deep > MOST_PACKED:
        raise RefusedPickle("pickles lie in one another without end")
    if data[:2] == b"PK":
        return names_in_torch_file(io.BytesIO(data), deep=deep)
    names: list[PickledName] = []
    legacy = False
    for records, found in read_several(data, 5, MOST_BYTES) if data else ():
        names += [name for name in found if str(name) != _LOAD_FROM_BYTES]
        for call in _packed_records(records, (_BUFFER, _LOAD_FROM_BYTES), packed=True):
            names += _names_in_bytes(_bytes_of(call), deep + 1)
        if (legacy := legacy or records == _LEGACY_MAGIC) is False:
            break
    return names


def read_bounded(path: Path) -> bytes:
    """Return the bytes of `.metadata` or of a file of `torch.save`. Raises RefusedPickle and OSError."""
    check_size(path)
    return path.read_bytes()


def check_size(path: Path, *, saved: bool = False) -> None:
    """Raise RefusedPickle if the file is too large to be read as a whole. `saved`: its hash is on record. Raises
    OSError."""
    most = (MOST_METADATA if path.name == METADATA_FILE else MOST_BYTES) * (SAVED_FACTOR if saved else 1)
    if path.stat().st_size > most:
        raise RefusedPickle(f"{path.name} has more than {most} bytes")


def _is_value(name: PickledName, checkout: Path | None) -> bool:
    for names in (METADATA_NAMES, _OBJECT_NAMES):
        if name.name in names.get(name.module, ()):
            return True
    if name.module == "torch":
        return _KINDS.fullmatch(name.name) is not None
    return checkout is not None and _is_plain_class(checkout, name)


def _is_plain_class(checkout: Path, name: PickledName) -> bool:
    """Return whether the checkout declares this as an enumeration, or as a dataclass without code of its own."""
    path = checkout.joinpath(*name.module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        try:
            found = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        return any(isinstance(each, ast.ClassDef) and each.name == name.name and _is_plain(each) for each in found.body)
    return False


def _is_plain(declared: ast.ClassDef) -> bool:
    own = {each.name for each in declared.body if isinstance(each, ast.FunctionDef)}
    if own & {"__init__", "__new__", "__post_init__", "__reduce__", "__setattr__", "__setstate__", "_missing_"}:
        return False
    words = [ast.unparse(each) for each in (*declared.bases, *declared.decorator_list)]
    return any(re.fullmatch(r"(\w+\.)?(\w*Enum|dataclass(\(.*\))?|NamedTuple)", word) for word in words)


def blocks_of(records: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, file, offset and length of each block. Raises AttributeError, KeyError or TypeError for records of
    another form."""
    for index, info in records.state["storage_data"].items():
        state = info.state
        yield str(index.state["fqn"]), *place_of(state["relative_path"], state["offset"], state["length"])


def place_of(file: Any, offset: Any, length: Any) -> tuple[str, int, int]:
    """Return a place if it lies inside the checkpoint. Raises RefusedPickle."""
    if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
        raise RefusedPickle("it names a file outside the checkpoint")
    if not all(type(each) is int and 0 <= each < 1 << 60 for each in (offset, length)):
        raise RefusedPickle("it names a block without a place")
    return file, offset, length


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint, by key; empty if its `.metadata` cannot be read."""
    try:
        kinds = read_records(read_bounded(folder / METADATA_FILE))[0].state["state_dict_metadata"]
        return {key: tuple(kind.state["size"].arguments[0]) for key, kind in kinds.items() if is_call_of(kind, _TENSOR)}
    except (OSError, *MALFORMED):
        return {}


def tensor_blocks(records: Any, *, others: bool = False) -> list[tuple[str, str, int, int]]:
    """Return key, file, offset and length of the blocks of tensors; `others`: of everything else."""
    kinds = records.state["state_dict_metadata"]
    tensors = {key for key, kind in kinds.items() if is_call_of(kind, _TENSOR)}
    return [block for block in blocks_of(records) if (block[0] in tensors) is not others]
