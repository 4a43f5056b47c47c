"""The reference of settings: type, default and docstring of every setting of a run config.

Names, types and defaults come from the schema. Descriptions are the docstrings below the fields, which are read from
the source on demand, so that a program that only reads a config does not pay for them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import CONFIG_CLASSES, CommonConfig, trainers_with
from relayrun.config.sections.base import AnySection, is_section, section_fields
from relayrun.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting, or a section of settings."""

    name: str
    """Full name, as for `--set`; the user chooses the part in angle brackets."""
    type: str
    """Type in words: `integer above 0`, `full | selective`, `section`, ..."""
    default: str | None
    """Default in YAML; None for a required setting and for a section."""
    words: str
    """Docstring, and the trainers with this section unless all have it."""

    @property
    def is_section(self) -> bool:
        return self.type == "section"


CAMPAIGN_SETTINGS = [
    Setting(name=name, type=kind, default=None if kind == "section" else "none", words=words)
    for name, (kind, words) in yaml_file.read_yaml(Path(__file__).with_name("campaign_settings.yaml")).values.items()
]
"""Settings of a config of several runs."""


def describe_settings() -> list[Setting]:
    """Return every setting and section in the order of the schema, first those of all trainers."""
    found: dict[str, Setting] = {}
    kinds: list[type[CommonConfig]] = [CommonConfig, *CONFIG_CLASSES.values()]
    for kind in kinds:
        for setting in _settings(kind, ""):
            found.setdefault(setting.name, setting)
    return [_with_trainers(setting) for setting in found.values()]


def _with_trainers(setting: Setting) -> Setting:
    trainers = trainers_with(setting.name)
    if "." in setting.name or len(trainers) == len(CONFIG_CLASSES):
        return setting
    return replace(setting, words=f"{setting.words} Of runs with trainer {' or '.join(trainers)}.")


def find_setting(name: str) -> list[Setting]:
    """Return the setting `name`; for a section, also all settings within. Raises ConfigError with the nearest name."""
    known = [*describe_settings(), *CAMPAIGN_SETTINGS]
    name = re.sub(r"\.\d+(\..*)?$", "", name)  # an entry of a list, which is described as a whole
    if found := [each for each in known if _is_within(each.name.split("."), name.split("."))]:
        return found
    names = [each.name for each in known]
    near = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`relayrun explain` lists them all"
    raise ConfigError(f"there is no setting {name!r}", where="relayrun explain", hint=hint)


def _is_within(known: list[str], wanted: list[str]) -> bool:
    """True if a setting has the wanted name or lies below it; a name of the user's fits angle brackets."""
    pairs = zip(known, wanted, strict=False)
    return len(known) >= len(wanted) and all(mine == own or mine.startswith("<") for mine, own in pairs)


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of run config files, for editors. Nothing is required, since a file may leave settings to
    the files that it includes."""
    schema = CommonConfig.model_json_schema()
    for kind in CONFIG_CLASSES.values():
        own = kind.model_json_schema()
        schema["$defs"] |= own["$defs"]
        schema["properties"] = own["properties"] | schema["properties"]
    sections = {section.__name__: section for kind in CONFIG_CLASSES.values() for section in _sections(kind)}
    for name, part in {**schema["$defs"], "CommonConfig": schema}.items():
        part.pop("required", None)
        words = _docstrings(sections.get(name, CommonConfig))  # type: ignore[arg-type]  # a class is hashable
        for field, described in part.get("properties", {}).items():
            if field in words:
                described["description"] = words[field]
    properties = schema["properties"]
    properties["include"] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Other config files, from this one's folder; later ones win, this file's own settings over all.",
    }
    properties["cluster"] = {
        "anyOf": [{"type": "string"}, properties["cluster"]],
        "description": "Name of a file of configs/clusters/, or what stands in one.",
    }
    mixture = schema["$defs"]["DataSection"]["properties"]["mixture"]
    schema["$defs"]["DataSection"]["properties"]["mixture"] = {
        "anyOf": [{"type": ["string", "null"]}, mixture],
        "description": mixture.get("description", ""),
    }
    schema["allOf"] = [
        {
            "if": {"properties": {"trainer": {"const": trainer}}, "required": ["trainer"]},
            "then": {"properties": {name: False for name in properties if name not in {*kind.model_fields, "include"}}},
        }
        for trainer, kind in CONFIG_CLASSES.items()
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "relayrun run config"}


def _settings(section: AnySection, prefix: str) -> Iterator[Setting]:
    words = _docstrings(section)  # type: ignore[arg-type]  # a class is hashable
    shown = TypeAdapter(section).json_schema()
    for field, info in section_fields(section).items():
        name = f"{prefix}{field}"
        inner, form = _section_in(info.annotation)
        if inner is not None:
            own = words.get(field) or " ".join((inspect.getdoc(inner) or "").split())
            yield Setting(name=name, type="section", default=None, words=own)
            yield from _settings(inner, f"{name}.{form}")
            continue
        described = shown["properties"][field]
        default = None if info.is_required() else _yaml(info.get_default(call_default_factory=True))
        yield Setting(
            name=name,
            type=_type(described, shown.get("$defs", {})),
            default=default,
            words=words.get(field) or info.description or "",
        )


def _section_in(annotation: Any) -> tuple[AnySection | None, str]:
    """Return the section in a field, and the part of names between the field and the section's settings."""
    if is_section(annotation):
        return annotation, ""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict:
        inner, form = _section_in(arguments[1])
        return inner, f"<name>.{form}"
    for argument in arguments:
        inner, form = _section_in(argument)
        if inner is not None and typing.get_origin(annotation) is not list:
            return inner, form
    return None, ""


def _sections(annotation: Any) -> Iterator[AnySection]:
    if is_section(annotation):
        yield annotation
        for info in section_fields(annotation).values():
            yield from _sections(info.annotation)
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def _type(described: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "anyOf" in described:
        return " | ".join(dict.fromkeys(_type(each, definitions) for each in described["anyOf"]))
    if "$ref" in described:
        return str(described["$ref"]).rpartition("/")[2]
    if "enum" in described:
        return " | ".join(map(str, described["enum"]))
    if "const" in described:
        return str(described["const"])
    kind = str(described.get("type", "any value"))
    if kind == "array":
        return f"list of {_type(described.get('items', {}), definitions)}"
    if kind == "object":
        inner = described.get("additionalProperties", described.get("patternProperties", True))
        inner = next(iter(inner.values())) if isinstance(inner, dict) and "type" not in inner and inner else inner
        return f"mapping of names to {_type(inner, definitions)}" if isinstance(inner, dict) else "mapping"
    words = {"string": "text", "boolean": "true | false"}.get(kind, kind)
    limits = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}
    return " ".join([words, *(f"{word} {described[limit]}" for limit, word in limits.items() if limit in described)])


def _yaml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


@functools.cache
def _docstrings(section: AnySection) -> dict[str, str]:
    own = (part for part in reversed(section.__mro__) if part.__module__.startswith("relayrun.config."))
    return {
        field.target.id: " ".join(below.value.value.split())
        for part in own
        for field, below in itertools.pairwise(_classes(inspect.getsourcefile(part) or "")[part.__name__].body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


@functools.cache
def _classes(source: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
