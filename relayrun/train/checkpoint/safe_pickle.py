"""A file of `torch.save` as values, read without running or importing anything that it names.

Megatron-LM lays its arguments into `common.pt`: an argparse.Namespace, with enumerations and types of its own classes.
A pickle of such things names functions to be called. Here a name becomes an inert record of that name, and a call
becomes a record of its arguments, whatever they are; only a Namespace, a few containers and tensors are made. No class
or function of this process is reached, so that none can be changed either. So a file of any origin can be read, also
where neither torch nor the program that wrote it is installed.
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
"""The largest file that is read: arguments and a schedule take a few kilobytes."""
MOST_PICKLE = 1 << 22
"""The largest pickle in it; a byte of it can make a set of 216 bytes, and its tensors lie beside it."""
MOST_DEEP = 100
"""How deep tuples lie in one another; their hashes are asked for without a limit of Python's."""
MOST_TEXT = 1 << 24
"""The longest text of what was read, in characters, about: a value that is named again is written out again."""


class UnreadablePickle(ValueError):
    """A file that is no whole file of `torch.save`."""


class NotAllowed(Exception):
    """A pickle asks for something that no value needs."""


class _Sealed(type):
    """A class without attributes that could be set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise NotAllowed(f"it gives attributes to {cls.__name__}")


def sealed_class(name: str, make: Callable[..., Any], **more: Any) -> Any:
    """Return a class of the name `name` whose calls are those of `make`: what a pickle may name in place of `make`.

    The opcode BUILD sets attributes of whatever was named, and a class or function of the process would keep them.
    """
    return _Sealed(name, (), {"__slots__": (), "__new__": lambda _, *given: make(*given), **more})


class _Named(type):
    """Something that the file names: `str` has the name."""

    origin: str

    def __str__(cls) -> str:
        return cls.origin

    __repr__ = __str__


class InertValue(metaclass=_Named):
    """What a call of something that the file names was to give; it can do nothing. `str` has the name.

    The name itself, where nothing calls it, is a class of this kind: see `is_inert`.
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
    """What it was called with."""
    state: Any
    items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Take an item of a list."""
        self.items.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        """Take the items of a list."""
        self.items.extend(items)

    def __str__(self) -> str:
        inside = ", ".join(repr(each) if isinstance(each, InertValue) else str(each) for each in self.arguments)
        return f"{self.origin}({inside})" if self.arguments else self.origin

    def __repr__(self) -> str:
        """Inside another one: a file of 200 bytes can name records in records whose text has gigabytes."""
        return f"{self.origin}(...)" if self.arguments else self.origin


def is_inert(value: Any) -> bool:
    """Whether this is no value, but the record of something that the file names."""
    return isinstance(value, (InertValue, _Named))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as bytes, without torch."""

    dtype: str
    """As `float32`."""
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    """Its values in row-major order; nothing where it is a view of another form."""


@dataclass(frozen=True)
class _Storage:
    dtype: str
    data: bytes = field(repr=False)


def _inert(module: str, name: str) -> Any:
    return _Named(name.rpartition(".")[2], (InertValue,), {"origin": f"{module}.{name}"})


def _member(owner: Any, name: Any) -> Any:
    """What Python 3.11 writes for a member of an enumeration: getattr(class, name)."""
    if not (isinstance(owner, type) and issubclass(owner, InertValue) and isinstance(name, str)):
        raise pickle.UnpicklingError("it asks for an attribute of something that is no class of its own")
    return _inert(*_parts(f"{owner.origin}.{name}"))()


def _parts(origin: str) -> tuple[str, str]:
    module, _, name = origin.rpartition(".")
    return module, name


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
del _OPCODES[pickle.BYTEARRAY8[0]]  # it would make room for as many bytes as the file says


class _Reader(pickle._Unpickler):  # that of Python: the one of C makes room for as many values as a file has numbers
    dispatch: ClassVar[dict[int, Any]] = _OPCODES | {
        code[0]: _weighed(_OPCODES[code[0]]) for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    }
    stack: list[Any]

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self._archive, self._root = archive, root
        self._tuples: dict[int, tuple[int, int]] = {}
        if archive.getinfo(f"{root}/data.pkl").file_size > MOST_PICKLE:
            raise UnreadablePickle(f"its pickle has more than {MOST_PICKLE} bytes")
        self._storages: dict[str, bytes] = {}
        self._left = MOST_BYTES
        super().__init__(io.BytesIO(archive.read(f"{root}/data.pkl")))

    def weigh(self) -> None:
        """Bound the tuple that was made: its hash looks at all that is in it, again at each place where it is."""
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
    """Characters of a value's text, about; `known`: by id, those of what was met before. Raises Unreadable."""
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = 1  # inside itself Python writes dots
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
        raise UnreadablePickle(f"its text has more than {MOST_TEXT} characters")
    if isinstance(value, InertValue):
        known[id(value)] = own  # inside another one
    return known[id(value)]


def read_pickle(data: bytes) -> Any:
    """Return what a file of `torch.save` with this content holds. Raises Unreadable."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
                raise UnreadablePickle(f"it holds more than {MOST_BYTES} bytes")
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise UnreadablePickle("it is no file of torch.save")
            found = _Reader(archive, names[0].removesuffix("/data.pkl")).load()
            _text_length(found, {})
            return found
    except UnreadablePickle:
        raise
    except (Exception, RecursionError) as error:  # whatever flipped bytes make of a pickle
        raise UnreadablePickle(f"{type(error).__name__}: {error}") from None
