"""A finding of a check, and the list of all findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

from relayrun.config.compose.schema import CONFIG_CLASSES, CommonConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.errors import ConfigError, RelayrunError, combined_error

FindingLevel = Literal["ok", "assumed", "not checked", "warning", "error"]
"""`ok`: looked at. `assumed`: taken from a setting or a formula. `not checked`: nobody can know it here."""
QUIET_LEVELS: tuple[FindingLevel, ...] = ("ok", "assumed", "not checked")

_SECTIONS = dict.fromkeys(name for kind in CONFIG_CLASSES.values() for name in kind.model_fields)
_SETTING = re.compile(rf"(?:{'|'.join(_SECTIONS)})(?:\.[\w-]+)*")


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """A subject that a check looked at, the fact that it found, and the remedy."""

    name: str
    """Name of the subject, as `subject.detail`: the same in every version, for programs."""
    level: FindingLevel
    """`error` is what a submit refuses."""
    words: str
    where: str | None = None
    """File and line, folder or shard."""
    setting: str | None = None
    """Name of the setting."""
    value: Any = None
    """The setting's value, or a measurement."""
    remedy: str | None = None
    error: RelayrunError | None = field(default=None, compare=False, repr=False)
    """Exception of a submit if this is the only error."""

    @property
    def line(self) -> str:
        """The finding in one line."""
        return ": ".join(filter(None, (self.where, self.setting, self.words)))

    def as_json(self) -> dict[str, Any]:
        """Return the finding for JSON; every name is always there."""
        names = ("name", "level", "words", "where", "setting", "value", "remedy")
        return {name: getattr(self, name) for name in names}


class FindingDetails(TypedDict, total=False):
    """Further fields of a `CheckFinding`, with the file, folder or shard that it names."""

    where: object
    setting: str | None
    value: Any
    remedy: str | None


class Findings:
    """All findings of one look, in the order in which they were made."""

    def __init__(self, config: CommonConfig, given: LocatedSettings | None = None) -> None:
        """`given`: the written settings with their files and lines, if known."""
        self._values = config.model_dump(mode="json")
        self._given = given
        self.all: list[CheckFinding] = []

    def ok(self, name: str, words: str, **details: Unpack[FindingDetails]) -> None:
        self._add("ok", name, words, **details)

    def assume(self, name: str, words: str, **details: Unpack[FindingDetails]) -> None:
        """Add a fact that settings or a formula say, and nobody looked at."""
        self._add("assumed", name, words, **details)

    def skip(self, name: str, words: str, **details: Unpack[FindingDetails]) -> None:
        """Add a subject that was not checked, and the reason."""
        self._add("not checked", name, words, **details)

    def warn(self, name: str, words: str, **details: Unpack[FindingDetails]) -> None:
        """Add a fact that a submit accepts, with a warning."""
        self._add("warning", name, words, **details)

    def refuse(self, name: str, words: str, **details: Unpack[FindingDetails]) -> None:
        """Add a fact that a submit refuses."""
        self._add("error", name, words, **details)

    @contextmanager
    def catching(self, name: str, ok: str | None = None) -> Iterator[None]:
        """Make an error of a `with` block a finding; without an error, add `ok` if it is given."""
        try:
            yield
        except (RelayrunError, OSError) as error:
            self.add_error(name, error)
        else:
            if ok is not None:
                self.ok(name, ok)

    def add_error(self, name: str, error: RelayrunError | OSError) -> None:
        """Add an error that was raised: its place is a setting's name, or a file."""
        if isinstance(error, RelayrunError):
            setting = error.where if error.where is not None and _SETTING.fullmatch(error.where) else None
            where = None if setting is not None else error.where
            self._add("error", name, error.message, where=where, setting=setting, remedy=error.hint, error=error)
        else:
            self._add("error", name, error.strerror or str(error), where=error.filename)

    @property
    def errors(self) -> list[CheckFinding]:
        return [finding for finding in self.all if finding.level == "error"]

    @property
    def warnings(self) -> list[CheckFinding]:
        return [finding for finding in self.all if finding.level == "warning"]

    def raise_errors(self) -> None:
        """Raise what was found, all in one error."""
        errors = [finding.error for finding in self.errors if finding.error is not None]
        if errors:
            raise combined_error(errors)

    def _add(
        self,
        level: FindingLevel,
        name: str,
        words: str,
        error: RelayrunError | None = None,
        **details: Unpack[FindingDetails],
    ) -> None:
        where, setting, remedy = details.get("where"), details.get("setting"), details.get("remedy")
        value = details.get("value")
        place = None if where is None else str(where)
        if setting is not None:
            value = self._value(setting) if value is None else value
            if place is None and self._given is not None:
                place = self._given.place(tuple(setting.split(".")))
                if name == "settings.secret" and place is not None:
                    place = place.partition("=")[0]  # of --set
        if level == "error" and error is None:
            error = ConfigError(words, where=": ".join(filter(None, (place, setting))) or None, hint=remedy)
        found = CheckFinding(
            name=name, level=level, words=words, where=place, setting=setting, value=value, remedy=remedy, error=error
        )
        self.all.append(found)

    def _value(self, setting: str) -> Any:
        """The config's value under a dotted name; None for a section, and for an unknown name."""
        value: Any = self._values
        for part in setting.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return None if isinstance(value, dict) else value


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if there is not one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
