"""Base class and text types of all sections of a config."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from relayrun.errors import why_url_is_refused
from relayrun.slurmtime import parse_time

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _time_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no Slurm time; write MM, HH:MM:SS or D-HH:MM:SS")
    if parse_time(str(value)) <= 0:
        raise ValueError("the time limit must be positive")
    return str(value).strip()


def one_line(value: str) -> str:
    """Return the text unchanged. Raises ValueError for a control character."""
    if not value.isprintable() and (control := next((c for c in value if unicodedata.category(c) in _BREAKS), None)):
        raise ValueError(f"holds the control character {control!r}; it would end a line of a job script")
    return value


_BREAKS = ("Cc", "Zl", "Zp")
"""Unicode's categories of control characters and line separators."""

SingleLine = Annotated[str, AfterValidator(one_line)]
"""Text without control characters: it becomes part of a job script, a command line or a file of variables."""


def _on_this_machine(value: str) -> str:
    if (refusal := why_url_is_refused(value)) is not None:
        raise ValueError(refusal)
    return value


OutputPath = Annotated[SingleLine, AfterValidator(_on_this_machine)]
"""A folder for output: a path, not a URL."""
SlurmTime = Annotated[str, BeforeValidator(_time_text)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`module:name` of a user's object. Only ranks import it, because their Python finds the module."""
_Item = TypeVar("_Item")
NonEmptyList = Annotated[list[_Item], Field(min_length=1)]
"""A list of at least one."""


class Section(BaseModel):
    """A part of the config: no unknown names, no silent conversion, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)
