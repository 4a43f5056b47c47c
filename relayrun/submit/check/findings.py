"""One thing that a check looked at, and the list of them all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from relayrun.config.compose.schema import CONFIG_CLASSES, CommonConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.errors import ConfigError, RelayrunError, combined_error

FindingLevel = Literal["ok", "warning", "error"]

_SECTIONS = dict.fromkeys(name for kind in CONFIG_CLASSES.values() for name in kind.model_fields)
_SETTING = re.compile(rf"(?:{'|'.join(_SECTIONS)})(?:\.[\w-]+)*")


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """What was looked at, what is there, and what to do."""

    name: str
    """What was looked at, as `subject.detail`: the same in every version, for programs."""
    level: FindingLevel
    """`error` is what a submit refuses."""
    words: str
    where: str | None = None
    """File and line, folder or shard."""
    setting: str | None = None
    """Name of the setting that it is about."""
    value: Any = None
    """The setting's value, or what was measured."""
    remedy: str | None = None
    error: RelayrunError | None = field(default=None, compare=False, repr=False)
    """What a submit raises where this is the only error."""

    @property
    def line(self) -> str:
        """The finding in one line."""
        return ": ".join(filter(None, (self.where, self.setting, self.words)))

    def as_json(self) -> dict[str, Any]:
        """Return the finding for JSON; every name is always there."""
        names = ("name", "level", "words", "where", "setting", "value", "remedy")
        return {name: getattr(self, name) for name in names}


class Findings:
    """All findings of one look, in the order in which they were made."""

    def __init__(self, config: CommonConfig, given: LocatedSettings | None = None) -> None:
        """`given`: what was written, and in which file and line, where that is known."""
        self._values = config.model_dump(mode="json")
        self._given = given
        self.all: list[CheckFinding] = []

    def ok(self, name: str, words: str, *, setting: str | None = None, value: Any = None) -> None:
        self._add("ok", name, words, where=None, setting=setting, value=value, remedy=None)

    def warn(
        self,
        name: str,
        words: str,
        *,
        where: object = None,
        setting: str | None = None,
        value: Any = None,
        remedy: str | None = None,
    ) -> None:
        """Add what a submit takes, and says."""
        self._add("warning", name, words, where=where, setting=setting, value=value, remedy=remedy)

    def refuse(
        self,
        name: str,
        words: str,
        *,
        where: object = None,
        setting: str | None = None,
        value: Any = None,
        remedy: str | None = None,
    ) -> None:
        """Add what a submit refuses."""
        self._add("error", name, words, where=where, setting=setting, value=value, remedy=remedy)

    def catching(self, name: str, ok: str | None = None) -> CatchErrors:
        """Make an error of a `with` block a finding; without one, `ok` is found where it is given."""
        return CatchErrors(self, name, ok)

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
        *,
        where: object = None,
        setting: str | None = None,
        value: Any = None,
        remedy: str | None = None,
        error: RelayrunError | None = None,
    ) -> None:
        if setting is not None and value is None:
            value = self._value(setting)
        place = None if where is None else str(where)
        if place is None and setting is not None and self._given is not None:
            place = self._given.place(tuple(setting.split(".")))
        if level == "error" and error is None:
            error = ConfigError(words, where=": ".join(filter(None, (place, setting))) or None, hint=remedy)
        self.all.append(
            CheckFinding(
                name=name,
                level=level,
                words=words,
                where=place,
                setting=setting,
                value=value,
                remedy=remedy,
                error=error,
            )
        )

    def _value(self, setting: str) -> Any:
        """What the config holds under a dotted name; None where that is a section, or nothing."""
        value: Any = self._values
        for part in setting.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return None if isinstance(value, dict) else value


class CatchErrors:
    """See `Findings.catching`."""

    def __init__(self, findings: Findings, name: str, ok: str | None) -> None:
        self._findings, self._name, self._ok = findings, name, ok

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, RelayrunError | OSError):
            self._findings.add_error(self._name, error)
            return True
        if error is None and self._ok is not None:
            self._findings.ok(self._name, self._ok)
        return False


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where there is not one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
