"""A flag of a command line with what asked for it, and which of several that say the same holds.

    settings  <  arrays of args_file  <  args

A later one takes the place of an earlier one of the same name, and of those that Megatron-LM takes for the same
thing (`_ALTERNATIVES`): nobody has to take back `--data-path` in order to give `--mock-data`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relayrun.errors import ConfigError

_PREFIX_FLAGS = frozenset(f"{part}data-path" for part in ("", "train-", "valid-", "test-"))
_ALTERNATIVES = (
    _PREFIX_FLAGS | {"data-args-path", "per-split-data-args-path", "mock-data"},
    frozenset({"bf16", "fp16"}),
    frozenset({"train-iters", "train-samples"}),
    frozenset({"lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction"}),
    frozenset({"lr-decay-iters", "lr-decay-samples"}),
    frozenset({"lr-wsd-decay-iters", "lr-wsd-decay-samples"}),
    frozenset({"override-opt_param-scheduler", "use-checkpoint-opt_param-scheduler"}),
)
"""Flags of which Megatron-LM takes one: if a later source gives one, the flags of earlier sources fall away."""

_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag and the words behind it."""

    name: str
    """Without dashes."""
    values: tuple[str, ...] = ()
    source: str
    """Origin of the flag: a setting's name, or a file and its line."""

    @property
    def words(self) -> list[str]:
        """The flag as words of a command line, so that argparse takes its values for values."""
        if len(self.values) == 1 and self.values[0].startswith("-") and not _NUMBER.fullmatch(self.values[0]):
            return [f"--{self.name}={self.values[0]}"]
        return [f"--{self.name}", *self.values]

    @property
    def text(self) -> str:
        """The flag for people, shortened if it has many values."""
        words = self.words
        return " ".join(words if len(words) <= 6 else [*words[:4], f"... ({len(words) - 1} words)"])


@dataclass(frozen=True, kw_only=True)
class MergedFlags:
    """The flags that hold, and notes on the others."""

    flags: list[Flag]
    notes: list[str]
    """Flags that do not hold because a later source says otherwise, a sentence each."""

    def find(self, name: str) -> Flag | None:
        """The flag of this name; None if there is none."""
        return next((flag for flag in self.flags if flag.name == name), None)

    @property
    def words(self) -> list[str]:
        return [word for flag in self.flags for word in flag.words]


@dataclass(frozen=True, kw_only=True)
class RemovedByArgs:
    """A flag that `args` takes back."""

    name: str
    source: str


def merge_flags(layers: Iterable[Sequence[Flag | RemovedByArgs]]) -> MergedFlags:
    """Merge several sources of flags; each holds over the sources before it, and within a source the last of a name."""
    holding: dict[str, Flag] = {}
    notes: list[str] = []
    for layer in layers:
        own = {entry.name for entry in layer}
        for entry in layer:
            before = holding.pop(entry.name, None)
            if isinstance(entry, RemovedByArgs):
                if before is not None:
                    notes.append(f"{entry.source} leaves out {before.text} of {before.source}")
                continue
            same = next((names for names in _ALTERNATIVES if entry.name in names), frozenset())
            others = [holding.pop(name, None) for name in sorted(same - own)]
            notes += [
                f"{entry.text} of {entry.source} takes the place of {other.text} of {other.source}"
                for other in others
                if other is not None
            ]
            if before is not None and not are_same_values(before.values, entry.values):
                notes.append(f"{entry.text} of {entry.source} holds over {before.text} of {before.source}")
            holding[entry.name] = entry
    return MergedFlags(flags=list(holding.values()), notes=notes)


def are_same_values(values: Sequence[str], others: Sequence[str]) -> bool:
    """Return True if words mean the same to a parser: numbers count by their value."""
    return [_number_or_text(value) for value in values] == [_number_or_text(other) for other in others]


def _number_or_text(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def flags_from_words(words: Sequence[tuple[str, str]], *, where: str) -> list[Flag]:
    """The flags of the words of a command line, each with its place. Raises ConfigError for a word without a flag.

    A flag goes to the next word that begins with two dashes, as Megatron-LM's parser, which takes no shortened names,
    would have it.
    """
    found: list[Flag] = []
    for word, place in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append(Flag(name=name, values=(value,) if equals else (), source=place))
        elif found and (not word.startswith("-") or _NUMBER.fullmatch(word)):
            last = found[-1]
            found[-1] = Flag(name=last.name, values=(*last.values, word), source=last.source)
        else:
            raise ConfigError(
                f"{word!r} stands behind no flag", where=place or where, hint="write --flag value, one behind the other"
            )
    return found


def flags_from_args(args: dict[str, object], known: frozenset[str], *, source: str) -> list[Flag | RemovedByArgs]:
    """The flags that `megatron_lm.args` gives.

    `true` is the flag alone, a list several words. `false` takes the flag back, and gives `--no-FLAG` or
    `--disable-FLAG` if the checkout has that flag, as for flags that are on by default.
    """
    found: list[Flag | RemovedByArgs] = []
    for name, value in args.items():
        if value is False:
            found.append(RemovedByArgs(name=name, source=source))
            opposite = next((no for no in (f"no-{name}", f"disable-{name}") if no in known), None)
            if opposite is not None:
                found.append(Flag(name=opposite, source=source))
            elif known and name not in known:
                found[-1] = Flag(name=name, source=source)  # for the check, which names the nearest one
        elif value is True:
            found.append(Flag(name=name, source=source))
        else:
            values = value if isinstance(value, list) else [value]
            found.append(Flag(name=name, values=tuple(str(each) for each in values), source=source))
    return found
