"""A mixture that is not written out in the run config: the name of a file, or one line.

A file, YAML or JSON, holds what `data.mixture` would: `{name: {path: ..., weight: ...}}`. A line is
`path,weight;path,weight`; each data set is named by the last part of its path that is no pattern.
Both become the written-out form, so that a config revision keeps the mixture itself and not a name of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from relayrun.config import yamlfile
from relayrun.config.yamlfile import LocatedSettings
from relayrun.errors import ConfigError

_HINT = "write a file {name: {path: ..., weight: ...}}, or PATH,WEIGHT;PATH,WEIGHT"


def insert(settings: LocatedSettings, root: Path) -> None:
    """Replace a text (or null) at `data.mixture` by what it means; paths start at `root`. Raises ConfigError."""
    data = settings.values.get("data")
    if not isinstance(data, dict) or "mixture" not in data:
        return
    text = data["mixture"]
    if text is None:  # an override takes away the config's own
        del data["mixture"]
        return
    if not isinstance(text, str):
        return
    place = settings.place(("data", "mixture")) or "data.mixture"
    if ";" in text or re.search(r",\s*[-+.\deE]+\s*$", text):
        data["mixture"] = parse_line(text, place)
        return
    file = root / Path(text).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no mixture file {file}", where=place, hint=_HINT)
    read = yamlfile.read(file)
    data["mixture"] = read.values
    settings.places.update({("data", "mixture", *location): at for location, at in read.places.items()})


def parse_line(text: str, place: str) -> dict[str, Any]:
    """The mixture that `path,weight;path,weight` means. Raises ConfigError."""
    mixture: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        path, comma, weight = part.rpartition(",")
        try:
            number = float(weight)
        except ValueError:
            number = 0.0
        if not comma or not path or not number > 0:
            raise ConfigError(f"{part!r} is no PATH,WEIGHT with a positive weight", where=place, hint=_HINT)
        name = _name(path)
        if name is None or name in mixture:
            what = "no name can be made of" if name is None else f"two data sets are named {name!r}; the second is"
            raise ConfigError(f"{what} {path!r}", where=place, hint="write a mixture file, which names its data sets")
        mixture[name] = {"path": path.strip(), "weight": number}
    return mixture


def _name(path: str) -> str | None:
    """The name of a data set: `/data/web*` → web; `/data/web/*` → web.

    A name is what counts a data set, so it depends on the path alone.
    """
    for part in reversed(Path(path.strip()).parts):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub(r"\[[^]]*\]|[*?]", "", part)).strip("-._")
        if name:
            return name
    return None
