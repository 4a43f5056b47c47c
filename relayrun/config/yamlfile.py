"""YAML files with the line of every setting, read without YAML 1.1's surprises.

PyYAML reads `12:00:00` as 43200, `1e-5` as a string, `no` as False and `010` as 8. Here a value is null,
`true`/`false`, a decimal integer, a decimal float, or else a string; the schema then accepts or refuses it.
A name given twice is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from relayrun.errors import ConfigError

Location = tuple[str, ...]
"""The way to a setting from the top, for example ("training", "steps")."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    """Quotes what either kind of reader, PyYAML's or ours, would take for something else than text."""


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
    """Plain values, and for each the place it came from (`file:line`)."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Location, str] = field(default_factory=dict)

    def place(self, location: Location) -> str | None:
        """Where the setting, or the nearest one around it, was written."""
        while location:
            if location in self.places:
                return self.places[location]
            location = location[:-1]
        return None

    def merge(self, other: LocatedSettings) -> None:
        """Put `other` over this: mappings are merged, everything else is replaced."""
        _merge(self.values, other.values)
        self.places.update(other.places)


def read(path: Path) -> LocatedSettings:
    """Read a YAML file whose top is a mapping. Raises ConfigError with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("there is no such config file", where=path) from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=path) from None
    return parse(text, source=str(path))


def parse(text: str, *, source: str) -> LocatedSettings:
    """Parse YAML text whose top is a mapping."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        settings = LocatedSettings()
        if node is None:
            return settings
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("a config file is a mapping of names to values", where=f"{source}:1")
        settings.values = _mapping(loader, node, (), source, settings.places)
        return settings
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', error)}", where=where) from None
    finally:
        loader.dispose()


def parse_value(text: str) -> Any:
    """One value as it would be read after a colon. Raises ConfigError."""
    return parse(f"value: {text}", source="--set").values["value"]


def dump(values: dict[str, Any]) -> str:
    """Values as YAML text that `parse`, and PyYAML too, read back as they are."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def in_line(value: Any) -> str:
    """One value as YAML text in a line that `parse_value` reads back as it is."""
    return (
        yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
        .removesuffix("...\n")
        .rstrip("\n")
    )


def _mapping(
    loader: _Loader, node: yaml.MappingNode, at: Location, source: str, places: dict[Location, str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = f"{source}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError("a name must be plain text", where=place)
        name = str(key_node.value)
        if name in result:
            raise ConfigError(f"{'.'.join((*at, name))} is given twice", where=place)
        places[(*at, name)] = place
        result[name] = _value(loader, value_node, (*at, name), source, places)
    return result


def _value(loader: _Loader, node: yaml.Node, at: Location, source: str, places: dict[Location, str]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, at, source, places)
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, (*at, str(index)), source, places) for index, item in enumerate(node.value)]
    return loader.construct_object(node)


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
