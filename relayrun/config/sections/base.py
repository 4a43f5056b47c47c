"""Base class and text types of all sections of a config.

Modules of sections leave out `from __future__ import annotations`: each annotation would be compiled at every import.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from relayrun.config.sections.dataclass_section import DataclassSection
from relayrun.slurmtime import parse_time

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _time_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no Slurm time; write MM, HH:MM:SS or D-HH:MM:SS")
    if parse_time(str(value)) <= 0:
        raise ValueError("the time limit must be positive")
    return str(value).strip()


SlurmTime = Annotated[str, BeforeValidator(_time_text)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`module:name` of a user's object. Only ranks import it, because their Python finds the module."""
_Item = TypeVar("_Item")
NonEmptyList = Annotated[list[_Item], Field(min_length=1)]
"""A list of at least one."""


class Section(BaseModel):
    """A part of the config: no unknown names, no silent conversion, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


AnySection = type[BaseModel] | type[DataclassSection]


def is_section(annotation: Any) -> typing.TypeGuard[AnySection]:
    """Return whether an annotation is the class of a section, with or without pydantic."""
    return isinstance(annotation, type) and issubclass(annotation, (BaseModel, DataclassSection))


def section_fields(section: AnySection) -> Mapping[str, FieldInfo]:
    """Return the settings of a section by name."""
    if issubclass(section, BaseModel):
        return section.model_fields
    hints = typing.get_type_hints(section, include_extras=True)
    found = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]  # each is a dataclass
        info = FieldInfo.from_annotation(hints[field.name])
        if field.default_factory is not dataclasses.MISSING:
            info.default_factory = field.default_factory
        elif field.default is not dataclasses.MISSING:
            info.default = field.default
        found[field.name] = info
    return found
