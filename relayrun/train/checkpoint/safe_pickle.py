"""Reads the values in a file of `torch.save` without running or importing anything that it names.

Megatron-LM's `common.pt` holds its arguments: an argparse.Namespace with enumerations and types of its own classes. A
pickle of them names functions to call. Here a name becomes an inert record of that name, and a call a record of its
arguments; only a Namespace, a few containers and tensors are made. No class or function of this process is reached, so
none can be changed. So a file of any origin can be read, even without torch and the program that wrote it.
"""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

_CONTAINERS = {"set": set, "frozenset": frozenset, "slice": slice}
MOST_BYTES = 1 << 30
"""Largest file that is read; arguments and a schedule take a few kilobytes."""
MOST_PICKLE = 1 << 22
"""Largest pickle in the file; a byte of it can make a set of 216 bytes, and tensors are stored outside it."""
MOST_DEEP = 100
"""Deepest nesting of tuples, whose hashes Python computes recursively without a limit."""
MOST_TEXT = 1 << 24
"""Largest text of the values in characters, approximately; a value that is named again is counted again."""


class CorruptTorchFile(ValueError):
    """The file is not an intact file of `torch.save`."""


class NotAllowed(Exception):
    """A pickle requests an operation that values do not need."""


class _Sealed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise NotAllowed(f"it gives attributes to {cls.__name__}")


def sealed_class(name: str, make: Callable[..., Any], **more: Any) -> Any:
    """Return a class named `name` whose call is `make`: the object that a pickle may name in place of `make`.

    The opcode BUILD sets attributes of any named object, and a class or function of the process would keep them.
    """
    return _Sealed(name, (), {"__slots__": (), "__new__": lambda _, *given: make(*given), **more})


class _Named(type):
    """Object that the file names; `str` returns the name."""

    origin: str

    def __str__(cls) -> str:
        return cls.origin

    __repr__ = __str__


class InertValue(metaclass=_Named):
    """Record of a call of a named object; it can do nothing. `str` returns the name.

    A name that is not called is a class of this kind, see `is_inert`.
    """

    origin = ""
    """Module and name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> InertValue:
        made = object.__new__(cls)
        made.arguments = args
        made.state = None
        made.items = []
        return made

    arguments: tuple[Any, ...]
    """Arguments of the call."""
    state: Any
    items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Add an item of a list."""
        self.items.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        """Add items of a list."""
        self.items.extend(items)

    def __str__(self) -> str:
        inside = ", ".join(repr(each) if isinstance(each, InertValue) else str(each) for each in self.arguments)
        return f"{self.origin}({inside})" if self.arguments else self.origin

    def __repr__(self) -> str:
        """Short form inside other records: a file of 200 bytes can nest records whose full text has gigabytes."""
        return f"{self.origin}(...)" if self.arguments else self.origin


def is_inert(value: Any) -> bool:
    """True if this is the record of an object that the file names, not a value."""
    return isinstance(value, (InertValue, _Named))


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as bytes, without torch."""

    dtype: str
    """Such as `float32`."""
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    """Values in row-major order; empty for a view of another layout."""


@dataclass(frozen=True)
class _Storage:
    dtype: str
    data: bytes = field(repr=False)


def _inert(module: str, name: str) -> Any:
    return _Named(name.rpartition(".")[2], (InertValue,), {"origin": f"{module}.{name}"})


def _member(owner: Any, name: Any) -> Any:
    """Stand for getattr(class, name), which Python 3.11 writes for a member of an enumeration."""
    if not (isinstance(owner, type) and issubclass(owner, InertValue) and isinstance(name, str)):
        raise pickle.UnpicklingError("it asks for an attribute of something that is no class of its own")
    return _inert(*f"{owner.origin}.{name}".rsplit(".", 1))()


_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1}
_SIZES |= {"uint8": 1, "bool": 1}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
    shape = tuple(size.arguments[0]) if isinstance(size, InertValue) else tuple(size)
    if not isinstance(storage, _Storage) or not all(isinstance(each, int) and each >= 0 for each in (offset, *shape)):
        raise pickle.UnpicklingError("it holds a tensor of a kind that is not known")
    count = 1
    wanted: list[int] = []
    for length in reversed(shape):
        wanted.insert(0, count)
        count *= length
    item = _SIZES[storage.dtype]
    if count * item > MOST_BYTES:
        raise pickle.UnpicklingError(f"it holds a tensor of more than {MOST_BYTES} bytes")
    plain = tuple(wanted) == tuple(stride) or count <= 1
    data = storage.data[offset * item : (offset + count) * item] if plain else b""
    return StoredTensor(dtype=storage.dtype, shape=shape, data=data)


def _weighed(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_and_weigh(reader: Any) -> None:
        load(reader)
        reader.weigh()

    return load_and_weigh


_OPCODES = dict(pickle._Unpickler.dispatch)
del _OPCODES[pickle.BYTEARRAY8[0]]  # it allocates as many bytes as the file says


class _Reader(pickle._Unpickler):  # Python's, since C's allocates memory for any index in the file
    dispatch: ClassVar[dict[int, Any]] = _OPCODES | {
        code[0]: _weighed(_OPCODES[code[0]]) for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    }
    stack: list[Any]

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self._archive, self._root = archive, root
        self._tuples: dict[int, tuple[int, int]] = {}
        if archive.getinfo(f"{root}/data.pkl").file_size > MOST_PICKLE:
            raise CorruptTorchFile(f"its pickle has more than {MOST_PICKLE} bytes")
        self._storages: dict[str, bytes] = {}
        self._left = MOST_BYTES
        super().__init__(io.BytesIO(archive.read(f"{root}/data.pkl")))

    def weigh(self) -> None:
        """Bound the new tuple: its hash visits all its contents, again at each place of a shared part."""
        inside = [self._tuples.get(id(each), (1, 0)) for each in self.stack[-1] if isinstance(each, tuple)]
        weight, deep = 1 + sum(each for each, _ in inside), 1 + max((each for _, each in inside), default=0)
        if weight > MOST_PICKLE or deep > MOST_DEEP:
            raise pickle.UnpicklingError("its tuples lie in one another without end")
        self._tuples[id(self.stack[-1])] = weight, deep

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "argparse", "Namespace":
                return sealed_class("Namespace", argparse.Namespace)
            case "collections", "OrderedDict":
                return sealed_class("OrderedDict", OrderedDict)
            case (("builtins" | "__builtin__"), _) if name in _CONTAINERS:
                return sealed_class(name, _CONTAINERS[name])
            case (("builtins" | "__builtin__"), "getattr"):
                return sealed_class("getattr", _member)
            case "torch._utils", "_rebuild_tensor_v2":
                return sealed_class("_rebuild_tensor_v2", self._tensor)
        return _inert(module, name)

    def _tensor(self, *given: Any) -> StoredTensor:
        tensor = _tensor(*given)
        self._left -= len(tensor.data)
        if self._left < 0:
            raise pickle.UnpicklingError(f"its tensors have more than {MOST_BYTES} bytes")
        return tensor

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, *_ = pid
        dtype = _STORAGES.get(storage.__name__) if isinstance(storage, type) else None
        if kind != "storage" or dtype is None or not str(key).isalnum():
            raise pickle.UnpicklingError("it holds a tensor of a kind that is not known")
        if str(key) not in self._storages:
            self._storages[str(key)] = self._archive.read(f"{self._root}/data/{key}")
        return _Storage(dtype, self._storages[str(key)])


def _text_length(value: Any, known: dict[int, int]) -> int:
    """Return the approximate length of a value's text. `known`: lengths by id. Raises CorruptTorchFile."""
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = 1  # Python writes dots for a value inside itself
    inside: list[Any] = []
    if isinstance(value, InertValue):
        inside = [*value.arguments]
    elif isinstance(value, (dict, argparse.Namespace)):
        entries = value if isinstance(value, dict) else vars(value)
        inside = [*entries, *entries.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = [*value]
    elif isinstance(value, slice):
        inside = [value.start, value.stop, value.step]
    own = len(value) if isinstance(value, (str, bytes)) else len(value.origin) if is_inert(value) else 8
    known[id(value)] = own + sum(_text_length(each, known) for each in inside)
    if known[id(value)] > MOST_TEXT:
        raise CorruptTorchFile(f"its text has more than {MOST_TEXT} characters")
    if isinstance(value, InertValue):
        known[id(value)] = own  # its short form inside others
    return known[id(value)]


def read_pickle(data: bytes) -> Any:
    """Return the content of a file of `torch.save`. Raises CorruptTorchFile."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
                raise CorruptTorchFile(f"it holds more than {MOST_BYTES} bytes")
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise CorruptTorchFile("it is no file of torch.save")
            found = _Reader(archive, names[0].removesuffix("/data.pkl")).load()
            _text_length(found, {})
            return found
    except CorruptTorchFile:
        raise
    except (Exception, RecursionError) as error:  # flipped bytes in a pickle can raise anything
        raise CorruptTorchFile(f"{type(error).__name__}: {error}") from None
