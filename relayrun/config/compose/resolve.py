"""Resolves YAML files and `--set` overrides to a config, and writes it back to YAML.

`load_run_config` composes and checks; `read_settings` composes alone; `validate_settings` checks. `dump_run_config`
writes a config revision, `read_resolved_config` reads one, and `config_differences` compares two.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relayrun import places
from relayrun.config.compose import mixture_setting, sites, yaml_file
from relayrun.config.compose.schema import (
    CONFIG_CLASSES,
    CommandConfig,
    CommonConfig,
    DataSource,
    EvaluationSection,
    JobSection,
    MegatronConfig,
    RunConfig,
    trainers_with,
)
from relayrun.config.compose.yaml_file import LocatedSettings, Location
from relayrun.config.sections.base import is_section, section_fields
from relayrun.config.sections.notify import may_be_shown
from relayrun.errors import URL_WRITE_HINT, ConfigError, did_you_mean, did_you_mean_path, why_url_is_refused

CAMPAIGN_SECTIONS = ("sweep", "stages")
"""Sections of a config of several runs; see `relayrun.config.compose.campaign`."""
NODES_PLACEHOLDER = "{nodes}"
"""Stands for the number of nodes in a run's name."""


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> CommonConfig:
    """Compose and check the run config at `path`; `overrides` are texts `name.name=value`. Paths in the result are
    absolute. Raises ConfigError."""
    return validate_settings(read_settings(path, overrides))


def require_native(config: CommonConfig) -> RunConfig:
    """Return the config of a run of the native trainer. Raises ConfigError for another trainer."""
    if not isinstance(config, RunConfig):
        words = f"{config.project}/{config.name} is a run of trainer {config.trainer}, and this is for the native one"
        raise ConfigError(words, where="trainer", hint="use what that program itself has for it")
    return config


def read_settings(
    path: Path, overrides: Sequence[str] = (), *, changes: Sequence[LocatedSettings] = ()
) -> LocatedSettings:
    """Compose the run config at `path` without checks, with the location of each setting. Raises ConfigError. `changes`
    take precedence over the file and the overrides, except overrides of the cluster."""
    return compose_settings(_read_with_includes(path, ()), overrides, path=path, changes=changes)


def compose_settings(
    settings: LocatedSettings,
    overrides: Sequence[str] = (),
    *,
    path: Path | None = None,
    changes: Sequence[LocatedSettings] = (),
    of_cluster: Mapping[str, Any] | None = None,
) -> LocatedSettings:
    """Compose the settings of a run config, or of a command that has none. `of_cluster`: own settings of the cluster,
    added to the site's lists and mappings."""
    settings.root = root = places.project_folder(path)
    mixture_setting.insert_mixture(settings, root)  # so that overrides may change a part of it
    to_cluster = [text for text in overrides if text.startswith("cluster.")]
    settings.merge(read_overrides([text for text in overrides if text not in to_cluster]))
    for own in changes:
        settings.merge(own)
    sites.insert_site(settings, folders=sites.site_folders(path))
    for name, more in (of_cluster or {}).items():
        site = settings.values["cluster"]
        site[name] = [*site.get(name, []), *more] if isinstance(more, list) else {**site.get(name, {}), **more}
    settings.merge(read_overrides(to_cluster))  # last: an override beats the cluster's file in any order
    sites.refuse_other_cluster(settings, os.environ)
    sites.insert_environment(settings, os.environ)
    sites.insert_job_defaults(settings)
    _insert_notify_defaults(settings)
    _insert_nodes(settings)
    mixture_setting.insert_mixture(settings, root)
    return settings


def validate_settings(settings: LocatedSettings) -> CommonConfig:
    """Check composed settings against the schema and make their paths absolute, from `settings.root`. Raises
    ConfigError."""
    for several in CAMPAIGN_SECTIONS:
        if several in settings.values:
            words = "this config is of several runs"
            where = ": ".join(filter(None, (settings.place((several,)), several)))
            raise ConfigError(words, where=where, hint=f"`relayrun {several} submit` begins them")
    kind = _config_class(settings)
    try:
        config = kind.model_validate(settings.values)
    except ValidationError as error:
        details = _counting_errors(error.errors())
        lines = [_explain(detail, settings, kind) for detail in details]
        remedies = list(dict.fromkeys(_remedy(detail, settings, kind) for detail in details))
        raise ConfigError("\n       ".join(lines), hint="\n     ".join(remedies)) from None
    return _with_absolute_paths(config, settings.root or places.project_folder())


def read_trainer(path: Path) -> str:
    """Return the trainer of the run config at `path`. Raises ConfigError."""
    return _trainer(_config_class(_read_with_includes(path, ())))


def _config_class(settings: LocatedSettings) -> type[CommonConfig]:
    """Return the config class of the trainer in the settings. Raises ConfigError for an unknown trainer."""
    trainer = settings.values.get("trainer", "native")
    kind = CONFIG_CLASSES.get(trainer) if isinstance(trainer, str) else None
    if kind is None:
        place = settings.place(("trainer",))
        words = f"there is no trainer {trainer!r}; there are: {', '.join(CONFIG_CLASSES)}"
        where = ": ".join(filter(None, (place, "trainer")))
        raise ConfigError(words, where=where, hint=did_you_mean(str(trainer), CONFIG_CLASSES) or "name one of them")
    return kind


def dump_run_config(config: CommonConfig) -> str:
    """Return a resolved config as YAML text; reading it gives an equal config."""
    return yaml_file.dump_yaml(config.model_dump(mode="json"))


def read_resolved_config(path: Path) -> CommonConfig:
    return validate_settings(yaml_file.read_yaml(path))


def _with_absolute_paths(config: CommonConfig, root: Path) -> CommonConfig:
    changes: dict[str, Any] = {"run_dir": run_directory(config.run_dir, config.project, config.name, root)}
    if isinstance(config, RunConfig | MegatronConfig) and config.data is not None:
        data, tokenizer = config.data, _absolute(config.data.tokenizer, root)
        changes["data"] = data.model_copy(
            update={
                "tokenizer": tokenizer if Path(tokenizer).exists() else data.tokenizer,  # a name on the hub
                "datasets": [_absolute_or_url(folder, root) for folder in data.datasets],
                "mixture": {name: _absolute_source(source, root) for name, source in data.mixture.items()},
                "data_cache_dir": _absolute(data.data_cache_dir, root) if data.data_cache_dir else None,
                "shard_cache_dir": _absolute(data.shard_cache_dir, root) if data.shard_cache_dir else None,
                "validation": {
                    name: [_absolute(folder, root) for folder in folders] for name, folders in data.validation.items()
                },
            }
        )
    if config.evaluation is not None:
        changes["evaluation"] = _absolute_evaluation(config.evaluation, root)
    if isinstance(config, MegatronConfig):
        own = config.megatron_lm
        file = None if own.args_file is None else _absolute(own.args_file, root)
        changes["megatron_lm"] = own.model_copy(update={"dir": _absolute(own.dir, root), "args_file": file})
    if isinstance(config, CommandConfig):
        command = config.command
        words, resume = ([_absolute_file(word, root) for word in each] for each in (command.run, command.resume))
        changes["command"] = dataclasses.replace(command, run=words, resume=resume)
    return config.model_copy(update=changes)


def run_directory(given: str | None, project: str, name: str, root: Path) -> str:
    """Return the absolute directory of a run: `given`, or the default below `root`. Raises ConfigError for a URL."""
    if given and (refusal := why_url_is_refused(given)) is not None:
        raise ConfigError(refusal, where="run_dir", hint=URL_WRITE_HINT)
    return _absolute(given or f"logs/runs/{project}/{name}", root)


def _absolute_evaluation(own: EvaluationSection, root: Path) -> EvaluationSection:
    changes: dict[str, Any] = {
        name: [_absolute_file(word, root) for word in getattr(own, name)] for name in ("convert", "command")
    }
    if own.include_path is not None:
        changes["include_path"] = _absolute(own.include_path, root)
    return own.model_copy(update=changes)


def _absolute_file(word: str, root: Path) -> str:
    """Return a word of a command, made absolute if it is a file below `root`, such as `examples/train.py`."""
    looks_like_one = ("/" in word or Path(word).suffix != "") and not word.startswith("-")
    return _absolute(word, root) if looks_like_one and Path(_absolute(word, root)).is_file() else word


def _absolute(path: str, root: Path) -> str:
    return str(root / Path(path).expanduser())


def _absolute_source(source: DataSource, root: Path) -> DataSource:
    path = source.path
    if isinstance(path, str):
        return source.model_copy(update={"path": _absolute_or_url(path, root)})
    return source.model_copy(update={"path": path and [_absolute_or_url(part, root) for part in path]})


def _absolute_or_url(path: str, root: Path) -> str:
    return path if "://" in path else _absolute(path, root)


def _read_with_includes(path: Path, chain: tuple[Path, ...]) -> LocatedSettings:
    path = path.resolve()
    if path in chain:
        raise ConfigError("the files include each other: " + " -> ".join(map(str, (*chain, path))), where=path)
    own = yaml_file.read_yaml(path)
    includes = own.values.pop("include", [])
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError("include is a list of file names", where=own.place(("include",)))
    result = LocatedSettings()
    for name in includes:
        included = path.parent / name
        if not included.is_file():
            where, hint = own.place(("include",)), did_you_mean_path(included) or "name a file by its path from here"
            raise ConfigError(f"there is no such file to include: {name}", where=where, hint=hint)
        result.merge(_read_with_includes(included, (*chain, path)))
    result.merge(own)
    return result


def read_overrides(texts: Sequence[str]) -> LocatedSettings:
    """Return the settings of texts `name.name=value`, unchecked. Raises ConfigError."""
    result = LocatedSettings()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise ConfigError(
                f"{text!r} is no override; write NAME.NAME=VALUE", where="--set", hint="for example training.steps=50"
            )
        result.merge(located_setting(name, yaml_file.parse_yaml_value(value), place=f"--set {text}"))
    return result


def located_setting(name: str, value: Any, *, place: str | None) -> LocatedSettings:
    """Return a setting `section.setting` with its location."""
    location = tuple(name.split("."))
    places = {(*location, *inner): place for inner in _locations(value)} if place is not None else {}
    nested = value
    for part in reversed(location):
        nested = {part: nested}
    return LocatedSettings(nested, places)


def _locations(value: Any) -> Iterator[Location]:
    yield ()
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ((name, *location) for location in _locations(inner))


def _insert_notify_defaults(settings: LocatedSettings) -> None:
    """Move the site's defaults of `notify` under the run's own; targets are merged by name."""
    cluster, own = settings.values.get("cluster"), settings.values.get("notify", {})
    defaults = cluster.get("notify") if isinstance(cluster, dict) else None
    if not isinstance(cluster, dict) or not isinstance(defaults, dict) or not isinstance(own, dict):
        return
    del cluster["notify"]
    places = {
        location[1:]: place for location, place in settings.places.items() if location[:2] == ("cluster", "notify")
    }
    merged = LocatedSettings({"notify": defaults}, places)
    for location in places:
        del settings.places["cluster", *location]
    kept = {location: place for location, place in settings.places.items() if location[0] == "notify"}
    merged.merge(LocatedSettings({"notify": own}, kept))
    settings.values["notify"] = merged.values["notify"]
    settings.places.update(merged.places)


def _insert_nodes(settings: LocatedSettings) -> None:
    """Replace `{nodes}` in the run's name: another size of the job is another run."""
    name, job = settings.values.get("name"), settings.values.get("job")
    nodes = job.get("nodes", JobSection.model_fields["nodes"].default) if isinstance(job, dict) else None
    if isinstance(name, str) and isinstance(nodes, int):
        settings.values["name"] = name.replace(NODES_PLACEHOLDER, str(nodes))


def _explain(detail: Any, settings: LocatedSettings, kind: type[CommonConfig]) -> str:
    location: Location = tuple(str(part) for part in detail["loc"])
    name = ".".join(location)
    place = settings.place(location)
    if not may_be_shown(location) and place is not None and place.startswith("--set "):
        place = place.partition("=")[0]
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        names = _fields_at(location[:-1], kind)
        near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
        message = "unknown setting; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}")
        if location[:-1] == ("model", "transformer"):
            message = _why_no_transformer_field(location[-1], names)
        if others := _sections_of_other_trainers(location):
            message = f"only a run of trainer {' or '.join(others)} has this; this one's trainer is {_trainer(kind)}"
    elif detail["type"] == "missing":
        message = "this setting is missing"
    elif "input" in detail and not isinstance(detail["input"], dict) and may_be_shown(location):
        message += f", not {detail['input']!r}"
    return ": ".join(filter(None, [place, name, message]))


TRANSFORMER_FIELDS = Path(__file__).with_name("transformer_fields.yaml")


def _why_no_transformer_field(name: str, known: Sequence[str]) -> str:
    sections = ("training", "parallel", "model")
    others: dict[str, str] = yaml_file.read_yaml(TRANSFORMER_FIELDS).values
    others |= {field: f"{section}.{field}" for section in sections for field in _fields_at((section,), RunConfig)}
    if (setting := others.get(name)) is not None:
        return f"a run says this with {setting}; set that"
    near = did_you_mean(name, [*known, *others], most=1)
    return (
        f"there is no such field; {near or '`relayrun explain model.transformer` lists them'}. Fields of megatron-core "
        "that relayrun sets itself, or whose effect its layers lack, are refused"
    )


def _counting_errors(details: Sequence[Any]) -> list[Any]:
    """Drop missing sections if a section of another trainer is present: then `trainer` is wrong."""
    forbidden = (tuple(detail["loc"]) for detail in details if detail["type"] == "extra_forbidden")
    if not any(_sections_of_other_trainers(location) for location in forbidden):
        return list(details)
    return [detail for detail in details if detail["type"] != "missing"]


def _sections_of_other_trainers(location: Location) -> list[str]:
    return trainers_with(location[0]) if len(location) == 1 else []


def _trainer(kind: type[CommonConfig]) -> str:
    return str(kind.model_fields["trainer"].default)


_SETTING = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b")
"""A setting's name in a message."""


def _remedy(detail: Any, settings: LocatedSettings, kind: type[CommonConfig]) -> str:
    location: Location = tuple(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        if others := _sections_of_other_trainers(location):
            return f"leave it out, or set trainer to {' or '.join(others)}"
        return "rename it, or leave it out; `relayrun explain` lists all settings"
    if not location:  # a rule between settings
        names = {tuple(name.split(".")) for name in _SETTING.findall(detail["msg"])}
        known = sorted(name for name in names if name[-1] in _fields_at(name[:-1], kind))
        places = [f"{'.'.join(name)} ({settings.place(name) or 'by default'})" for name in known]
        return f"change {' or '.join(places)}" if places else "`relayrun explain` says what the settings mean"
    while len(location) > 1 and location[-1] not in _fields_at(location[:-1], kind):
        location = location[:-1]
    more = "; trainer megatron-lm has more" if location in (("training", "precision"), ("optimizer", "name")) else ""
    return f"`relayrun explain {'.'.join(location)}` says what it takes{more}"


def _fields_at(location: Location, kind: type[CommonConfig]) -> list[str]:
    section: Any = kind
    for part in location:
        if is_section(section):
            field = section_fields(section).get(part)
            section = None if field is None else _section_of(field.annotation)
        else:  # a mapping or a list of sections, and one of its entries
            section = _section_of(typing.get_args(section)[-1])
        if section is None:
            return []
    return sorted(section_fields(section)) if is_section(section) else []


def _section_of(annotation: Any) -> Any:
    """Return the section in an annotation, or the mapping or list whose entries are sections; None for others."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        candidates = typing.get_args(annotation)
    else:
        candidates = (annotation,)
    several = (c for c in candidates if typing.get_origin(c) in (dict, list) and _section_of(typing.get_args(c)[-1]))
    return next((c for c in candidates if is_section(c)), next(several, None))


def changed_settings(one: CommonConfig, other: CommonConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of each setting that differs, by its dotted name."""
    first, second = (dict(_flat_settings(each.model_dump(mode="json"))) for each in (one, other))
    for values, config in ((first, one), (second, other)):
        if isinstance(config, RunConfig):  # a submit writes it out
            values["training.loss_mean"] = config.training.resolved_loss_mean
    pairs = {name: (first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def config_differences(one: CommonConfig, other: CommonConfig) -> list[str]:
    """Return `name: value -> value` for each setting that differs."""
    found = changed_settings(one, other).items()
    return [f"{name}: {yaml_file.value_in_line(old)} -> {yaml_file.value_in_line(new)}" for name, (old, new) in found]


def _flat_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
