"""Messages between ranks: values as JSON in tensors, so nothing is unpickled.

A value holds numbers, text, bytes, lists, tuples, sets, dictionaries, tensors, torch's types, and records: data
classes, named tuples, enumerations and errors of relayrun, torch.distributed and megatron-core. A record gets its
fields, and neither its constructor nor other code of its class runs. `send_no_pickles` gives torch's own object
collectives this form.

`RankObjectCollectives` sends small values between all ranks through rank 0, beside the collectives of the same group.
The collectives of a group must come in one order on every rank, so a second thread cannot call them. A second group
would need a second mesh: over gloo a socket from every rank to every other one. Messages with a tag of their own match
by sender and tag alone, whatever other threads do, and need no more sockets.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from relayrun.control.trainers.pickle_records import no_collection
from relayrun.errors import RelayrunError

RECORD_PACKAGES = ("relayrun", "torch.distributed", "megatron.core")
_ATOMS = frozenset((type(None), bool, int, float, str))
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_CONSTANTS = (*_TORCH_TYPES, Enum)


class NotAMessage(RelayrunError):
    """Bytes that no rank sends."""


def pack(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError if a message cannot hold it."""
    return json.dumps(_plain(value)).encode()


def unpack(data: bytes) -> Any:
    """Return the value that these bytes hold. Raises NotAMessage."""
    try:
        return json.loads(data, object_hook=_value)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise NotAMessage(f"bytes from another rank are no message: {type(error).__name__}: {error}") from None


def _plain(value: Any) -> Any:
    """Return a value in the types of JSON. Every object of JSON has one member: a tag of `_VALUES` and its content."""
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind is list:
        return [_plain(each) for each in value]
    if kind is torch.Size:
        return {"size": [*value]}
    if kind is tuple:
        return {"tuple": [_plain(each) for each in value]}
    if (form := _record_form(kind)) is not None:
        fields = [getattr(value, name) for name in form[1]]
        return {"record": [form[0], [each if type(each) in _ATOMS else _plain(each) for each in fields]]}
    if isinstance(value, _CONSTANTS):
        return _constant(value)
    if kind is dict or isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, BaseException):
        return _plain_error(value)
    if isinstance(value, traceback.StackSummary):
        return {"stack": [[each.filename, each.lineno, each.name, each.line] for each in value]}
    if isinstance(value, torch.Tensor):  # of the plain values of a state
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [_plain(value.dtype), [*value.shape], data.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, (set, frozenset)):
        return {"set": [_plain(each) for each in value]}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, (np.generic, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    raise TypeError(f"a message between ranks holds data, and no {kind.__module__}.{kind.__qualname__}")


@lru_cache(maxsize=None, typed=True)  # values of different enumerations may be equal
def _constant(value: Any) -> dict[str, Any]:
    if isinstance(value, Enum):
        return {"enum": [_name(type(value)), value.name]}
    return {"torch": str(value).removeprefix("torch.")}


def _plain_error(error: BaseException) -> dict[str, Any]:
    """Return an error, or its words if a message cannot hold it as it is."""
    try:
        arguments = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
        found = {"error": [_name(type(error)), _plain(arguments), _plain(vars(error))]}
        if str(unpack(json.dumps(found).encode())) == str(error):
            return found
    except (NotAMessage, ValueError, TypeError, LookupError, AttributeError):
        pass
    own = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    name = _name(RuntimeError if own in (Exception, BaseException) else own)
    return {"error": [name, {"tuple": [f"{type(error).__name__}: {error}"]}, {"dict": []}]}


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise TypeError(f"a message between ranks holds no record of {name}")
    return name


@cache
def _record_form(kind: Any) -> tuple[str, Sequence[str]] | None:
    """Return the names of a record's class and of its fields; None for another class."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _name(kind), kind._fields
    if dataclasses.is_dataclass(kind):
        return _name(cast(type, kind)), [each.name for each in dataclasses.fields(kind)]
    return None


@cache
def _class(name: str) -> type:
    """Return a class of the packages whose records a message may hold, or an error of Python's own."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or found.__module__ != module:
        raise TypeError(f"{name} is no class")
    if module == "builtins" and issubclass(found, BaseException):
        return found
    if not any(module == package or module.startswith(f"{package}.") for package in RECORD_PACKAGES):
        raise TypeError(f"{name} is no record of a message")
    return found


def _record(content: list[Any]) -> Any:
    kind, values = _class(content[0]), content[1]
    if (form := _record_form(kind)) is None:
        raise TypeError(f"{content[0]} is no record")
    made: Any = object.__new__(kind) if not issubclass(kind, tuple) else tuple.__new__(kind, values)
    for name, value in zip(form[1], values, strict=True):
        if not isinstance(made, tuple):
            object.__setattr__(made, name, value)
    return made


def _error(content: list[Any]) -> BaseException:
    kind, arguments, state = _class(content[0]), content[1], content[2]
    if not issubclass(kind, BaseException):
        raise TypeError(f"{content[0]} is no error")
    made = kind.__new__(kind, *arguments)
    vars(made).update(state)
    return made


def _torch_type(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _TORCH_TYPES):
        raise TypeError(f"torch.{name} is no type of a tensor")
    return found


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "size": torch.Size,
    "tuple": tuple,
    "dict": dict,
    "record": _record,
    "torch": _torch_type,
    "enum": lambda content: _member(*content),
    "error": _error,
    "stack": traceback.StackSummary.from_list,
    "tensor": lambda content: (
        torch.frombuffer(bytearray.fromhex(content[2]), dtype=content[0]).reshape(content[1])
        if content[2]
        else torch.empty(content[1], dtype=content[0])
    ),
    "bytes": bytes.fromhex,
    "set": set,
    "slice": lambda content: slice(*content),
}


def _member(name: str, member: str) -> Enum:
    kind = _class(name)
    if not issubclass(kind, Enum):
        raise TypeError(f"{name} is no enumeration")
    return kind[member]


def _value(found: dict[str, Any]) -> Any:
    ((tag, content),) = found.items()
    return _VALUES[tag](content)


class _Packer:
    """In the place of `pickle.Pickler` in torch's object collectives."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(pack(value))


class _Unpacker(_Packer):
    """In the place of `pickle.Unpickler`."""

    def load(self) -> Any:
        return unpack(self._file.read())


def send_no_pickles() -> None:
    """Let torch's object collectives in this process, which libraries call too, send values in this form."""
    assert issubclass(distributed_c10d._unpickler, (pickle.Unpickler, _Unpacker))  # a name that they use
    distributed_c10d._pickler, distributed_c10d._unpickler = _Packer, _Unpacker  # type: ignore[assignment]


class RankObjectCollectives:
    """Values between ranks; all call the same methods in the same order, from one thread each."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        """`group`: over gloo, of all ranks. `tag`: not used by other messages of the group."""
        self._group = group
        self._tag = tag
        self.rank = group.rank()
        self.size = group.size()

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0; None elsewhere."""
        if self.rank:
            self._send([0], [_packed(value)])
            return None
        received = self._receive(range(1, self.size))
        with no_collection():
            return [value, *map(_unpacked, received)]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return the value for this rank. `values`: on rank 0 one value for each rank; None elsewhere."""
        if self.rank:
            return _unpacked(self._receive([0])[0])
        assert values is not None
        self._send(range(1, self.size), [_packed(value) for value in values[1:]])
        return values[0]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        if self.rank:
            return _unpacked(self._receive([0])[0])
        self._send(range(1, self.size), [_packed(value)] * (self.size - 1))
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        values: list[Any] = self.broadcast(self.gather(value))
        return values

    def _send(self, targets: Sequence[int], data: Sequence[torch.Tensor]) -> None:
        lengths = [torch.tensor([len(each)]) for each in data]
        sent = [dist.isend(each, rank, self._group, self._tag) for rank, each in zip(targets, lengths, strict=True)]
        sent += [dist.isend(each, rank, self._group, self._tag) for rank, each in zip(targets, data, strict=True)]
        for work in sent:
            assert work is not None
            work.wait()

    def _receive(self, sources: Sequence[int]) -> list[torch.Tensor]:
        """Return what each source sent, in their order. Messages of one rank arrive in order."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in sources]
        self._take(sources, lengths)
        data = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self._take(sources, data)
        return data

    def _take(self, sources: Sequence[int], targets: Sequence[torch.Tensor]) -> None:
        taken = [dist.irecv(each, rank, self._group, self._tag) for rank, each in zip(sources, targets, strict=True)]
        for work in taken:
            assert work is not None
            work.wait()


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return unpack(data.numpy().tobytes())
