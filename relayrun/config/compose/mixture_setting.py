"""Reads a `data.mixture` that the run config gives as the name of a file, or as a line.

A file, YAML or JSON, has the content of `data.mixture`: `{name: {path: ..., weight: ...}}`. A line is
`path,weight;path,weight`; each data set is named by the last part of its path without wildcards. A file of Megatron's
`--data-args-path` (WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone) is accepted, too. All become the written-out
form, so a config revision keeps the mixture itself.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.errors import ConfigError

_HINT = "write a file {name: {path: ..., weight: ...}}, or PATH,WEIGHT;PATH,WEIGHT"

_MAPPING = re.compile(r"^\s*(\{|[\w\"'.-]+\s*:(\s|$))", re.M)
"""A line that begins a mapping in YAML or JSON."""


def insert_mixture(settings: LocatedSettings, root: Path) -> None:
    """Replace a text (or null) at `data.mixture` by the mixture; paths start at `root`. Raises ConfigError."""
    data = settings.values.get("data")
    if not isinstance(data, dict) or "mixture" not in data:
        return
    text = data["mixture"]
    if text is None:  # an override removes the config's own
        del data["mixture"]
        return
    if not isinstance(text, str):
        return
    place = settings.place(("data", "mixture")) or "data.mixture"
    if ";" in text or re.search(r",\s*[-+.\deE]+\s*$", text):
        data["mixture"] = parse_mixture_line(text, place)
        return
    file = root / Path(text).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no mixture file {file}", where=place, hint=_HINT)
    if (words := _data_args(file)) is not None:
        data["mixture"] = parse_data_args(words, str(file))
        settings.places.update({("data", "mixture", name): str(file) for name in data["mixture"]})
        return
    read = yaml_file.read_yaml(file)
    data["mixture"] = read.values
    settings.places.update({("data", "mixture", *location): at for location, at in read.places.items()})


def parse_mixture_line(text: str, place: str) -> dict[str, Any]:
    """Return the mixture of a line `path,weight;path,weight`. Raises ConfigError."""
    mixture: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        path, comma, weight = part.rpartition(",")
        number = _weight(weight) or 0.0
        if not comma or not path or not number > 0:
            raise ConfigError(f"{part!r} is no PATH,WEIGHT with a positive weight", where=place, hint=_HINT)
        name = _name(path)
        if name is None or name in mixture:
            what = "no name can be made of" if name is None else f"two data sets are named {name!r}; the second is"
            raise ConfigError(f"{what} {path!r}", where=place, hint="write a mixture file, which names its data sets")
        mixture[name] = {"path": path.strip(), "weight": number}
    return mixture


def _data_args(file: Path) -> list[str] | None:
    """Return the words of a file of Megatron's --data-args-path; None for a mapping in YAML or JSON."""
    if file.suffix in (".yaml", ".yml", ".json"):
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    return None if _MAPPING.search(text) else text.split()


def parse_data_args(words: Sequence[str], place: str) -> dict[str, Any]:
    """Return the mixture for the words of a file of Megatron's --data-args-path. Raises ConfigError.

    WEIGHT PREFIX WEIGHT PREFIX ...: each prefix is a data set, named by its whole path. Prefixes alone are one data set
    `train` with equally likely windows, as Megatron weighs them.
    """
    hint = "write WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone, separated by blanks"
    weights = [_weight(word) for word in words]
    if not any(weight is not None for weight in weights):
        if not words:
            raise ConfigError("names no prefix", where=place, hint=hint)
        return {"train": {"path": [_literal(word) for word in words], "weight": 1.0}}
    if (
        len(words) % 2
        or any(weight is None for weight in weights[::2])
        or any(weight is not None for weight in weights[1::2])
    ):
        raise ConfigError("weights and prefixes do not alternate", where=place, hint=hint)
    mixture: dict[str, Any] = {}
    for weight, prefix in zip(weights[::2], words[1::2], strict=True):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", prefix).strip("-._")
        if not name or name in mixture:
            raise ConfigError(
                f"{prefix}: {'two prefixes have the name' if name else 'no name can be made of'} {name or prefix!r}",
                where=place,
                hint="name each prefix once; or write a mixture file, which names its data sets",
            )
        mixture[name] = {"path": _literal(prefix), "weight": weight}
    return mixture


def _weight(word: str) -> float | None:
    """Return the number in a word; None if it is not a number."""
    try:
        return float(word)
    except ValueError:
        return None


def _literal(prefix: str) -> str:
    """Return a prefix as a path; Megatron has no patterns."""
    return prefix if "://" in prefix else glob.escape(prefix)


def _name(path: str) -> str | None:
    """Return the name of a data set: `/data/web*` → web; `/data/web/*` → web. Samples are counted by name, so it
    depends on the path alone."""
    for part in reversed(Path(path.strip()).parts):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub(r"\[[^]]*\]|[*?]", "", part)).strip("-._")
        if name:
            return name
    return None
