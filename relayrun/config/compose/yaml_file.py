"""YAML files with the line of every setting, read without YAML 1.1's surprises.

PyYAML reads `12:00:00` as 43200, `1e-5` as a string, `no` as False and `010` as 8. Here a value is null,
`true`/`false`, a decimal integer, a decimal float, or else a string; the schema then accepts or refuses it. A duplicate
name is an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from relayrun.errors import ConfigError, did_you_mean_path
from relayrun.terminal import one_line

MAX_VALUES = 100_000
"""Maximum values of a file, including repeats by aliases: a few lines of nested aliases can mean billions."""

Location = tuple[str, ...]
"""Path of a setting from the top, for example ("training", "steps")."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    """Quotes strings that PyYAML or this module would read as another type."""


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), _first)


@dataclass
class LocatedSettings:
    """Plain values, and the location (`file:line`) of each."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Location, str] = field(default_factory=dict)
    root: Path | None = None
    """Base of relative paths in the values; None: the project of the working directory."""

    def place(self, location: Location) -> str | None:
        """Return the location of the setting, or of the nearest one around it."""
        while location:
            if location in self.places:
                return self.places[location]
            location = location[:-1]
        return None

    def merge(self, other: LocatedSettings) -> None:
        """Merge `other` over this: mappings are merged, everything else is replaced."""
        _merge(self.values, other.values)
        self.places.update(other.places)


def read_yaml(path: Path) -> LocatedSettings:
    """Read a YAML file whose top is a mapping. Raises ConfigError with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("there is no such config file", where=path, hint=did_you_mean_path(path) or None) from None
    except IsADirectoryError:
        raise ConfigError("this is a folder, not a config file", where=path, hint="name a file in it") from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=path, hint="save it as UTF-8") from None
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> LocatedSettings:
    """Parse YAML text whose top is a mapping."""
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not know
        raise ConfigError(f"not valid YAML: {getattr(error, 'reason', error)}", where=source) from None
    try:
        node = loader.get_single_node()
        settings = LocatedSettings()
        if node is None:
            return settings
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("a config file is a mapping of names to values", where=f"{source}:1")
        settings.values = _NodeReader(loader, source, settings.places).mapping(node, ())
        return settings
    except RecursionError:
        raise ConfigError("values are nested too deeply", where=source) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        hint = "mend this line, or the one before it: brackets, quotes, colons, indentation by blanks"
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', error)}", where=where, hint=hint) from None
    finally:
        loader.dispose()


def parse_yaml_value(text: str) -> Any:
    """Parse a value as if it followed a colon. Raises ConfigError."""
    values = parse_yaml(f"value: {text}", source="--set").values
    if values.keys() != {"value"}:
        raise ConfigError("one value stands behind an =, on one line", where=f"--set {text!r}")
    return values["value"]


def dump_yaml(values: dict[str, Any]) -> str:
    """Return YAML text that `parse_yaml`, and PyYAML too, read back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def value_in_line(value: Any) -> str:
    """Return a value as a line of YAML that `parse_yaml_value` reads back unchanged."""
    return (
        yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
        .removesuffix("...\n")
        .rstrip("\n")
    )


class _NodeReader:
    """Converts YAML nodes to plain values, with the location of every setting."""

    def __init__(self, loader: _Loader, source: str, places: dict[Location, str]) -> None:
        self._loader = loader
        self._source = source
        self._places = places
        self._around: set[int] = set()
        """Enclosing nodes of the current node, by identity, to detect aliases that contain themselves."""
        self._values = 0

    def _place(self, node: yaml.Node) -> str:
        return f"{self._source}:{node.start_mark.line + 1}"

    def mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("a name must be plain text", where=place, hint="quote it, or write NAME: VALUE")
            name = str(key_node.value)
            if name in result:
                words = f"{'.'.join((*at, name))} is given twice"
                raise ConfigError(words, where=place, hint=f"keep one; {self._places[(*at, name)]} has the first")
            self._places[(*at, name)] = place
            result[name] = self._value(value_node, (*at, name))
        return result

    def _value(self, node: yaml.Node, at: Location) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise ConfigError(f"more than {MAX_VALUES:,} values, with those that aliases repeat", where=self._source)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, at)
        if id(node) in self._around:
            # the node of an alias has the line of its anchor
            place = LocatedSettings(places=self._places).place(at) or self._source
            hint = "write the value out"
            raise ConfigError(f"{'.'.join(at)}: this alias names what it lies in", where=place, hint=hint)
        self._around.add(id(node))
        if isinstance(node, yaml.MappingNode):
            result: Any = self.mapping(node, at)
        else:
            items = [((*at, str(index)), item) for index, item in enumerate(node.value)]
            self._places.update((place, self._place(item)) for place, item in items)
            result = [self._value(item, place) for place, item in items]
        self._around.remove(id(node))
        return result

    def _scalar(self, node: yaml.ScalarNode, at: Location) -> Any:
        value, what = None, ""
        try:
            value = self._loader.construct_object(node)
        except (ValueError, TypeError, OverflowError, KeyError, IndexError, AttributeError):
            # Python refuses to read integers of more than 4,300 digits
            long = node.value.strip("+-_").isdecimal()
            what = "has more than 64 bits" if long else f"is no {node.tag.rpartition(':')[2]}"
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            what = "has more than 64 bits"
        elif isinstance(value, float) and not math.isfinite(value):
            what = "is no finite number"
        if what:
            hint = "quote it if it is text, or write a value of its kind" if value is None else "give one that fits"
            words = f"{'.'.join(at)}: {one_line(str(node.value), 40)!r} {what}"
            raise ConfigError(words, where=self._place(node), hint=hint)
        return value


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
