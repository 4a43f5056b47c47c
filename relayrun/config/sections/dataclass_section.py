"""Sections without pydantic: dataclasses that a submit validates with pydantic and a job reads from plan.json.

A job's supervisor and agents run on the host's Python, which has the standard library alone. So a section that they
read is a dataclass below `DataclassSection`, with its limits in the metadata of `Annotated`: `Limits` and `Checked`
give pydantic its schema, and `read_section` checks the same types and limits without pydantic.
"""

import dataclasses
import functools
import operator
import types
import typing
import unicodedata
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from relayrun.errors import why_url_is_refused

_Section = TypeVar("_Section", bound="DataclassSection")
_Reader = Callable[[Any, str], Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a number: greater than, at least, less than, at most."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        """The given bounds by the name of their function in `operator`."""
        return {name: bound for name, bound in vars(self).items() if bound is not None}

    def check(self, value: Any) -> None:
        """Raise ValueError if a number is out of bounds."""
        if not all(getattr(operator, name)(value, bound) for name, bound in self.bounds.items()):
            raise ValueError(f"{value!r} is outside its limits {self.bounds}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Add the bounds to pydantic's schema of the number."""
        return {**handler(source), **self.bounds}


@dataclasses.dataclass(frozen=True)
class Checked:
    """A function that returns a value, or raises ValueError with what is wrong with it."""

    function: Callable[[Any], Any]

    def check(self, value: Any) -> None:
        self.function(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Call the function behind pydantic's own validation."""
        call = {"type": "no-info", "function": self.function}
        return {"type": "function-after", "function": call, "schema": handler(source)}


Positive = Annotated[int, Limits(gt=0)]
NonNegative = Annotated[int, Limits(ge=0)]
PositiveFloat = Annotated[float, Limits(gt=0)]
NonNegativeFloat = Annotated[float, Limits(ge=0)]


def one_line(value: str) -> str:
    """Return the text unchanged. Raises ValueError for a control character."""
    if not value.isprintable() and (control := next((c for c in value if unicodedata.category(c) in _BREAKS), None)):
        raise ValueError(f"holds the control character {control!r}; it would end a line of a job script")
    return value


_BREAKS = ("Cc", "Zl", "Zp")
"""Unicode's categories of control characters and line separators."""

SingleLine = Annotated[str, Checked(one_line)]
"""Text without control characters: it becomes part of a job script, a command line or a file of variables."""


def on_this_machine(value: str) -> str:
    """Return a path unchanged. Raises ValueError for a URL."""
    if (refusal := why_url_is_refused(value)) is not None:
        raise ValueError(refusal)
    return value


OutputPath = Annotated[SingleLine, Checked(on_this_machine)]
"""A folder for output: a path, not a URL."""


class DataclassSection:
    """A part of the config that is a frozen dataclass with keyword-only fields."""

    __pydantic_config__: typing.ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Accept a mapping too: a strict dataclass takes its own objects alone."""
        schema = handler(source)
        inner = schema
        while inner["type"] != "dataclass":
            inner = inner["schema"]
        inner["strict"] = False
        return schema


def read_section(kind: type[_Section], values: Mapping[str, Any], where: str) -> _Section:
    """Make a section from the JSON object `where` of a record; names that it does not have are left out.

    Raises ValueError for a value of another type or outside its limits, with the setting's full name.
    """
    found: _Section = _reader(kind)(values, where)  # type: ignore[arg-type]  # a class is hashable
    return found


@functools.cache
def _reader(annotation: Any) -> _Reader:
    """Return the function that checks a value of JSON (and its place, for errors) and returns it as this type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return _object_reader(annotation, {each.name: hints[each.name] for each in dataclasses.fields(annotation)})
    if origin is Annotated:
        return _limited_reader(_reader(arguments[0]), annotation.__metadata__)
    if origin in (Union, types.UnionType):
        return _union_reader([_reader(each) for each in arguments])
    if origin is list:
        item = _reader(arguments[0])
        return lambda value, where: [item(each, f"{where}[{i}]") for i, each in enumerate(_of_type(list, value, where))]
    if origin is Literal:
        return lambda value, where: _one_of(arguments, value, where)
    return lambda value, where: _of_type(annotation, value, where)


def _object_reader(kind: Any, hints: Mapping[str, Any]) -> _Reader:
    readers = {name: _reader(hint) for name, hint in hints.items()}

    def read(value: Any, where: str) -> Any:
        given = _of_type(dict, value, where).items()
        return kind(**{name: readers[name](item, f"{where}.{name}") for name, item in given if name in readers})

    return read


def _limited_reader(inner: _Reader, metadata: tuple[Any, ...]) -> _Reader:
    def read(value: Any, where: str) -> Any:
        found = inner(value, where)
        try:
            for each in metadata:
                each.check(found)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return found

    return read


def _union_reader(readers: list[_Reader]) -> _Reader:
    def read(value: Any, where: str) -> Any:
        refused = ""
        for each in readers:
            try:
                return each(value, where)
            except ValueError as error:
                refused = str(error)
        raise ValueError(refused)

    return read


def _one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in choices:
        raise ValueError(f"{where}: {value!r} is none of {', '.join(map(repr, choices))}")
    return value


def _of_type(kind: Any, value: Any, where: str) -> Any:
    if type(value) not in ((float, int) if kind is float else (kind,)):  # true is no number
        raise ValueError(f"{where}: {value!r} is no {'null' if kind is type(None) else kind.__name__}")
    return value
