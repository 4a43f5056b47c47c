"""Interprets a pickle as plain data: names, calls and states become records; nothing is imported, called or changed.

A pickle is a program. Python's interpreter of it imports every name, calls what it named (REDUCE), and sets attributes
of any object (BUILD), also of classes and functions that belong to the process. Here a name is a PickledName, a call is
a PickledCall with its arguments, BUILD fills a PickledCall, and getattr gives the record of a member. Only the opcodes
that `pickle` and `torch.save` write for checkpoints are known; all others are refused.

Bounds: each opcode is charged before it makes anything, with the bytes that it and a copy of its result take at most; a
pickle that needs more than `MOST_MEMORY` is refused. Keys of dictionaries are flat, so that no hash takes long. Whoever
walks the result bounds the depth of its walk.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

MOST_MEMORY = 1_000_000_000
"""Bytes that a pickle may take, as charged: about 7,000 for each block in the metadata of a checkpoint."""
_OPCODE, _STEP, _CONTAINER, _PAIR, _CHARACTER = 24, 48, 200, 80, 4
"""Bytes that are charged: for an opcode, further ones for a step, a container or record, a pair, a byte of text."""
MOST_DEEP = 100
"""Deepest nesting of values that a walk follows."""
MOST_NAME = 200
"""Characters of a module and of a name."""
MOST_SHOWN = 400
"""Characters of a record's text."""
MOST_KEY = 1 << 48
"""Bound of integers in keys: larger ones can have equal hashes."""


MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
"""Errors that values of another form than expected raise."""


class CorruptPickle(ValueError):
    """The bytes are no intact pickle, or no intact file of `torch.save`."""


class RefusedPickle(CorruptPickle):
    """A pickle requests an operation that values do not need, or exceeds a bound."""


class PickledName:
    """A class, function or other object that a pickle names; `str` returns module and name."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    __repr__ = __str__


class PickledCall:
    """A call of a named object: arguments, the state and the items that its result gets. `str` returns a bounded
    text."""

    __slots__ = ("arguments", "function", "items", "state")

    def __init__(self, function: PickledName, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.state: Any = None
        self.items: Sequence[Any] = ()
        """Items that it gets as a list, or pairs that it gets as a dictionary."""

    def extend(self, items: Sequence[Any]) -> None:
        """Add items."""
        if not isinstance(self.items, list):
            self.items = []
        self.items.extend(items)

    def __str__(self) -> str:
        inside = ", ".join(_brief(each) for each in self.arguments[:MOST_SHOWN])
        return f"{self.function}({inside})"[:MOST_SHOWN] if self.arguments else str(self.function)

    def __repr__(self) -> str:
        return f"{self.function}(...)" if self.arguments else str(self.function)


class PersistentId:
    """An object outside the pickle, by the value that stands for it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def is_record(value: Any) -> bool:
    """Return whether this stands for an object, and is no value."""
    return isinstance(value, (PickledName, PickledCall, PersistentId))


def is_call_of(value: Any, *names: str) -> bool:
    """Return whether this is the record of a call of one of these names."""
    return isinstance(value, PickledCall) and str(value.function) in names


def read_records(data: bytes, most: int = MOST_MEMORY) -> tuple[Any, list[PickledName]]:
    """Return the content of a pickle and all names in it, also the unused ones. Raises CorruptPickle.

    `most`: bytes of memory, as charged.
    """
    return next(read_several(data, 1, most))


def read_several(data: bytes, count: int, most: int) -> Iterator[tuple[Any, list[PickledName]]]:
    """Yield the content and the names of pickles that follow one another. Raises CorruptPickle."""
    for _ in range(count):
        interpreter = _Interpreter(data, most)
        yield interpreter.load(), [*interpreter.names.values()]
        data = data[interpreter.end :]


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause garbage collection: visiting millions of new records again and again takes as long as making them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _brief(value: Any) -> str:
    if isinstance(value, (str, bytes)):
        return str(value[:MOST_SHOWN])
    return repr(value) if value is None or is_record(value) or isinstance(value, (bool, int, float)) else "..."


def _is_flat_key(key: Any) -> bool:
    if type(key) is int:
        return -MOST_KEY < key < MOST_KEY
    return key is None or type(key) in (str, bytes, bool, PickledName, PickledCall)


def check_key(key: Any) -> None:
    """Raise RefusedPickle for a key whose hash may take long, or equal many others."""
    if not (_is_flat_key(key) or (type(key) is tuple and len(key) < MOST_DEEP and all(map(_is_flat_key, key)))):
        raise RefusedPickle("it has a key that is neither text, a small number nor a short tuple of these")


class _Interpreter:
    """One pickle. Each opcode is a method that takes the position of its operand and returns the next opcode's."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most, self._left = data, most, most - len(data)
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Length of the stack at each mark."""
        self._memo: list[Any] = []
        self.end = 0
        """Position behind the pickle."""
        self.names: dict[tuple[str, str], PickledName] = {}

    def load(self) -> Any:
        try:
            with no_collection():
                self._run()
            return self._stack.pop()
        except CorruptPickle:
            raise
        except MALFORMED as error:
            raise CorruptPickle(f"it ends early, or has no form: {error}") from None

    def _run(self) -> None:
        """Execute all opcodes: the most frequent ones here, the others by their steps."""
        data, stack, memo = self._data, self._stack, self._memo
        steps: list[Callable[[int], int]] = [self._unknown] * 256
        for opcode, (name, *given) in _OPCODES.items():
            steps[opcode] = partial(getattr(self, name), *given) if given else getattr(self, name)
        at = 0
        for number in range(self._left // _OPCODE):
            code = data[at]
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            else:
                self._charge(_STEP, number * _OPCODE)
                at = steps[code](at + 1)
                if at < 0:
                    return
        self._charge(self._left + 1)

    def _charge(self, size: int, more: int = 0) -> None:
        """Take bytes from what is left. Raises RefusedPickle if it is not enough for them and `more`."""
        self._left -= size
        if self._left < more:
            raise RefusedPickle(f"it needs more than {self._most} bytes of memory")

    def _unknown(self, at: int) -> int:
        raise CorruptPickle(f"it has the unknown opcode {self._data[at - 1]:#x} at byte {at - 1}")

    def _stop(self, at: int) -> int:
        self.end = at
        return -1

    def _skip(self, size: int, at: int) -> int:
        return at + size

    def _mark(self, at: int) -> int:
        self._marks.append(len(self._stack))
        return at

    def _marked(self) -> list[Any]:
        """Take what lies above the last mark off the stack."""
        begin = self._marks.pop()
        found = self._stack[begin:]
        del self._stack[begin:]
        return found

    def _pop(self, at: int) -> int:
        if self._marks and self._marks[-1] == len(self._stack):
            raise CorruptPickle("it takes a mark for a value")
        self._stack.pop()
        return at

    def _unsigned(self, at: int, size: int) -> int:
        return int.from_bytes(self._data[at : at + size], "little")

    def _put(self, size: int, at: int) -> int:
        index = self._unsigned(at, size)
        if index > len(self._memo):
            raise CorruptPickle("it stores values in no order")
        self._memo[index : index + 1] = self._stack[-1:]
        return at + size

    def _constant(self, value: Any, at: int) -> int:
        self._stack.append(value)
        return at

    def _new(self, kind: type, at: int) -> int:
        self._charge(_CONTAINER)
        self._stack.append(kind())
        return at

    def _int(self, size: int, signed: bool, at: int) -> int:
        self._stack.append(int.from_bytes(self._data[at : at + size], "little", signed=signed))
        return at + size

    def _float(self, at: int) -> int:
        self._stack += struct.unpack_from(">d", self._data, at)
        return at + 8

    def _bytes(self, size: int, decode: Callable[[bytes], Any], at: int) -> int:
        begin = at + size
        end = begin + self._unsigned(at, size)
        self._charge(_CHARACTER * min(end - begin, len(self._data)))
        self._stack.append(decode(self._data[begin:end]))
        return end

    def _tuple(self, at: int) -> int:
        self._charge(_CONTAINER)
        self._stack.append(tuple(self._marked()))
        return at

    def _tuple_of(self, count: int, at: int) -> int:
        self._charge(_CONTAINER)
        stack = self._stack
        if len(stack) < count:
            raise CorruptPickle("it takes items that are not there")
        stack[-count:] = [tuple(stack[-count:])]
        return at

    def _append(self, at: int) -> int:
        self._marks.append(len(self._stack) - 1)
        return self._appends(at)

    def _appends(self, at: int) -> int:
        items, target = self._marked(), self._stack[-1]
        if type(target) not in (list, PickledCall):
            raise CorruptPickle("it appends to something that is no list")
        target.extend(items)
        return at

    def _item(self, at: int) -> int:
        self._marks.append(len(self._stack) - 2)
        return self._items(at)

    def _items(self, at: int) -> int:
        items, target = self._marked(), self._stack[-1]
        if type(target) not in (dict, PickledCall) or len(items) % 2:
            raise CorruptPickle("it sets items of something that is no dictionary")
        self._charge(_PAIR * len(items) // 2)
        pairs = [*zip(items[::2], items[1::2], strict=True)]
        for key, _ in pairs:
            if type(key) is not str:
                check_key(key)
        (target.update if type(target) is dict else target.extend)(pairs)
        return at

    def _global(self, at: int) -> int:
        middle = self._data.index(b"\n", at)
        end = self._data.index(b"\n", middle + 1)
        self._stack += self._data[at:middle].decode(), self._data[middle + 1 : end].decode()
        return self._stack_global(end + 1)

    def _stack_global(self, at: int) -> int:
        self._charge(_CONTAINER)
        name, module = self._stack.pop(), self._stack.pop()
        for text in (module, name):
            if type(text) is not str or len(text) > MOST_NAME or not text.replace(".", "a").isidentifier():
                raise CorruptPickle("it names an object by something that is no name")
        self._stack.append(self.names.setdefault((module, name), PickledName(module, name)))
        return at

    def _call(self, at: int) -> int:
        self._charge(_CONTAINER)
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not PickledName or type(arguments) is not tuple:
            raise RefusedPickle("it calls something that is no name")
        is_getattr = function.name == "getattr" and function.module in ("builtins", "__builtin__")
        self._stack.append(_member(*arguments) if is_getattr else PickledCall(function, arguments))
        return at

    def _build(self, at: int) -> int:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not PickledCall or target.state is not None or "." in target.function.name:
            raise RefusedPickle(f"it gives attributes to {_brief(target)}")
        target.state = state
        return at

    def _persistent(self, at: int) -> int:
        self._stack.append(PersistentId(self._stack.pop()))
        return at


def _member(*arguments: Any) -> PickledCall:
    """Return the record for getattr(class, name), which Python 3.11.0 to 3.11.3 write for a member of an enumeration:
    a call without arguments, since it can be neither called nor changed."""
    if len(arguments) == 2 and type(arguments[0]) is PickledName and type(arguments[1]) is str:
        owner, name = arguments
        if name.isidentifier() and not name.startswith("_") and len(name) <= MOST_NAME:
            return PickledCall(PickledName(owner.module, f"{owner.name}.{name}"), ())
    raise RefusedPickle("it asks for an attribute of something that is no enumeration")


_text = partial(str, encoding="utf-8", errors="surrogatepass")
_long = partial(int.from_bytes, byteorder="little", signed=True)
_OPCODES: dict[int, tuple[Any, ...]] = {0x80: ("_skip", 1), 0x95: ("_skip", 8)}  # PROTO, FRAME
_OPCODES |= {ord("."): ("_stop",), ord("("): ("_mark",), ord("0"): ("_pop",)}
_OPCODES |= {ord("q"): ("_put", 1), ord("r"): ("_put", 4), ord("J"): ("_int", 4, True), ord("M"): ("_int", 2, False)}
_OPCODES |= {ord("N"): ("_constant", None), 0x88: ("_constant", True), 0x89: ("_constant", False)}
_OPCODES |= {ord(")"): ("_constant", ()), ord("]"): ("_new", list), ord("}"): ("_new", dict)}
_OPCODES |= {ord("G"): ("_float",), 0x8A: ("_bytes", 1, _long), 0x8C: ("_bytes", 1, _text)}
_OPCODES |= {ord("X"): ("_bytes", 4, _text), ord("C"): ("_bytes", 1, bytes), ord("B"): ("_bytes", 4, bytes)}
_OPCODES |= {ord("t"): ("_tuple",), 0x85: ("_tuple_of", 1), 0x86: ("_tuple_of", 2), 0x87: ("_tuple_of", 3)}
_OPCODES |= {ord("a"): ("_append",), ord("e"): ("_appends",), ord("s"): ("_item",), ord("u"): ("_items",)}
_OPCODES |= {ord("c"): ("_global",), 0x93: ("_stack_global",), ord("Q"): ("_persistent",)}
_OPCODES |= {ord("R"): ("_call",), 0x81: ("_call",), ord("b"): ("_build",)}  # REDUCE, NEWOBJ, BUILD
"""Steps of the other known opcodes: method, and its first arguments."""
