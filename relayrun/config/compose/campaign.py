"""Expands a config with `sweep:` or `stages:` to the configs of its runs, each checked before anything is queued.

    sweep:
      product: {optimizer.lr: [1e-3, 2e-3]}     each value with each of the other axes
      list: [{model.num_layers: 12}]            settings that go together, one run (or one set of runs) a line
      at_once: 4                                chains at a time

    stages:
      stable: {}
      decay: {from: "stable:800", decay: 100}   a decay of 100 iterations from the checkpoint of iteration 800
      long: {from: decay, training.steps: 1200} when decay is done, from its last checkpoint

Every error names file and line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.describe import CAMPAIGN_SETTINGS
from relayrun.config.compose.schema import CommandConfig, CommonConfig, MegatronConfig, RunConfig
from relayrun.config.compose.yaml_file import LocatedSettings, Location
from relayrun.config.sections.base import NAME_PATTERN
from relayrun.control.rundir.campaign import CampaignMember
from relayrun.errors import ConfigError, combined_error, did_you_mean

CampaignKind = Literal["sweep", "stages"]
MAX_RUNS = 500
"""Maximum runs of a campaign: more are usually a mistake in an axis."""
SWEEP_KEYS, STAGE_KEYS = (
    [each.name.removeprefix(start) for each in CAMPAIGN_SETTINGS if each.name.startswith(start)]
    for start in ("sweep.", "stages.<name>.")
)


@dataclass(frozen=True, kw_only=True)
class CampaignRunDescription(CampaignMember):
    """A run of a campaign, with its config."""

    config: CommonConfig
    given: LocatedSettings


@dataclass(frozen=True, kw_only=True)
class CampaignDescription:
    """The content of a campaign's config."""

    kind: CampaignKind
    name: str
    """Project and name, as project/name."""
    folder: Path
    at_once: int | None
    runs: list[CampaignRunDescription]


def campaign_kind(given: LocatedSettings) -> CampaignKind | None:
    """Return the section that makes settings those of several runs; None for one run."""
    kinds: tuple[CampaignKind, ...] = ("sweep", "stages")
    return next((kind for kind in kinds if kind in given.values), None)


def describe_campaign(path: Path, overrides: list[str] | None = None, *, kind: CampaignKind) -> CampaignDescription:
    """Read the config of a campaign; compose and check the config of each run. Raises ConfigError."""
    return _CampaignReader(path, overrides or [], kind).describe()


class _CampaignReader:
    def __init__(self, path: Path, overrides: list[str], kind: CampaignKind) -> None:
        self._path = path
        self._overrides = overrides
        self._kind = kind
        self._whole = resolve.read_settings(path, overrides)
        self._root = self._whole.root or places.project_folder(path)

    def describe(self) -> CampaignDescription:
        for other in resolve.CAMPAIGN_SECTIONS:
            if other != self._kind and other in self._whole.values:
                if self._kind in self._whole.values:
                    self._refuse((other,), "a config has `sweep` or `stages`", "give each a config of its own")
                self._refuse((other,), "this is no sweep", f"use `relayrun {other} submit`")
        section = self._whole.values.get(self._kind)
        if not isinstance(section, dict) or not section:
            page = "sweeps" if self._kind == "sweep" else "stages"
            self._refuse((self._kind,), "this section is missing, or is empty", f"see `relayrun help {page}`")
        project, own = self._text("project"), self._text("name")
        given = self._whole.values.get("run_dir")
        self._folder = Path(resolve.run_directory(given if isinstance(given, str) else None, project, own, self._root))
        at_once, runs = (None, self._stages(section)) if self._kind == "stages" else self._sweep(section)
        if len({run.config.cluster.scheduler for run in runs}) > 1:
            self._refuse((self._kind,), "these runs are of clusters with different schedulers", "let all have one")
        return CampaignDescription(
            kind=self._kind, name=f"{project}/{own}", folder=self._folder, at_once=at_once, runs=runs
        )

    def _text(self, name: str) -> str:
        value = self._whole.values.get(name)
        if not isinstance(value, str) or not re.match(NAME_PATTERN, value):
            self._refuse((name,), "this setting is missing, or is no name", "letters, digits, dots and dashes")
        return str(value)

    def _refuse(self, location: Location, message: str, hint: str) -> NoReturn:
        place = self._whole.place(location) or str(self._path)
        raise ConfigError(message, where=f"{place}: {'.'.join(location)}", hint=hint)

    def _run(
        self,
        member: str,
        settings: Mapping[str, Any],
        at: Location,
        *,
        path: Path | None = None,
        load: str | None = None,
    ) -> tuple[CommonConfig, LocatedSettings]:
        """Compose and check the config of a run; `at` locates its settings in the file."""
        own = LocatedSettings({"name": f"{self._whole.values['name']}-{member}"})
        own.values |= {"project": self._whole.values["project"], "run_dir": f"{self._folder}-{member}"}
        own.places |= {(name,): place for name in ("project", "name") if (place := self._whole.place((name,)))}
        changes = [own]
        for name, value in settings.items():
            axis = ("sweep", "product", name)
            place = self._whole.place(axis if axis in self._whole.places else (*at, name))
            changes.append(resolve.located_setting(name, value, place=place))
        if load is not None:
            changes.append(resolve.located_setting("checkpoint.load", load, place=self._whole.place((*at, "from"))))
        if path is not None and path.resolve() != self._path.resolve():  # --set is not meant for another config
            given = resolve.read_settings(path, changes=changes)
        else:
            given = resolve.read_settings(self._path, self._overrides, changes=changes)
            for several in resolve.CAMPAIGN_SECTIONS:
                given.values.pop(several, None)
        return resolve.validate_settings(given), given

    # --- sweeps

    def _sweep(self, section: dict[str, Any]) -> tuple[int | None, list[CampaignRunDescription]]:
        for name in section:
            if name not in SWEEP_KEYS:
                hint = did_you_mean(name, SWEEP_KEYS) or f"a sweep has: {', '.join(SWEEP_KEYS)}"
                self._refuse(("sweep", name), "unknown", hint)
        at_once = section.get("at_once")
        if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
            self._refuse(("sweep", "at_once"), f"{at_once!r} is no number of chains", "write a whole number from 1 on")
        combinations = list(self._combinations(section))
        width = max(2, len(str(len(combinations))))
        runs, errors = [], []
        for number, (settings, at) in enumerate(combinations, start=1):
            member = f"{number:0{width}}"
            try:
                config, given = self._run(member, settings, at)
            except ConfigError as error:
                words = f"{error.message} (run {member}: {settings_in_words(settings)})"
                errors.append(ConfigError(words, where=error.where, hint=error.hint))
                continue
            folder = config.run_dir or ""
            runs.append(
                CampaignRunDescription(name=member, run_dir=folder, config=config, given=given, settings=settings)
            )
        if errors:
            raise combined_error(errors, "runs of this sweep are refused")
        return at_once, runs

    def _combinations(self, section: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Location]]:
        """Yield the settings of each run, and the location of its line in `list`."""
        product, lines = section.get("product", {}), section.get("list", [{}])
        if not isinstance(product, dict):
            self._refuse(("sweep", "product"), "it is a mapping of settings to lists of values", _PRODUCT)
        if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines) or not lines:
            self._refuse(("sweep", "list"), "it is a list of mappings of settings to values", _LIST)
        if not product and not any(lines):
            self._refuse(("sweep",), "there is no axis", _PRODUCT)
        count = len(lines)
        for name, values in product.items():
            self._axis(name, ("sweep", "product", name))
            if not isinstance(values, list) or not values:
                self._refuse(("sweep", "product", name), "an axis is a list of values", _PRODUCT)
            same = next((value for at, value in enumerate(values) if value in values[:at]), None)
            if same is not None:
                self._refuse(("sweep", "product", name), f"{same!r} is there twice", "leave one out")
            count *= len(values)
        for number, line in enumerate(lines):
            for name in line:
                at = ("sweep", "list", str(number), name)
                self._axis(name, at)
                if name in product:
                    self._refuse(at, "`product` has this setting too", "give it in one of them")
            if line in lines[:number]:
                words = f"{settings_in_words(line)} is there twice"
                self._refuse(("sweep", "list", str(number)), words, "leave one out")
        if count > MAX_RUNS:
            self._refuse(("sweep",), f"these are {count:,} runs", f"at most {MAX_RUNS}: shorten an axis")
        for line_number, line in enumerate(lines):
            for values in itertools.product(*product.values()):
                yield dict(zip(product, values, strict=True)) | line, ("sweep", "list", str(line_number))

    def _axis(self, name: str, at: Location) -> None:
        section, dot, rest = name.partition(".")
        if not dot or not rest:
            self._refuse(at, "name a setting as section.setting", "for example optimizer.lr")
        if section == "cluster":
            self._refuse(at, "all runs of a sweep have one cluster", "submit a sweep on each")

    # --- stages

    def _stages(self, section: dict[str, Any]) -> list[CampaignRunDescription]:
        runs: dict[str, CampaignRunDescription] = {}
        for name, values in section.items():
            if not re.match(NAME_PATTERN, name):
                self._refuse(("stages", name), "this is no name", "letters, digits, dots and dashes")
            if values is not None and not isinstance(values, dict):
                self._refuse(("stages", name), "a stage is a mapping", '{from: "stable:800", decay: 100}')
            runs[name] = self._stage(name, values or {}, runs)
        if len(runs) > MAX_RUNS:
            self._refuse(("stages",), f"these are {len(runs):,} stages", f"at most {MAX_RUNS}")
        return list(runs.values())

    def _stage(
        self, name: str, values: dict[str, Any], before: Mapping[str, CampaignRunDescription]
    ) -> CampaignRunDescription:
        at = ("stages", name)
        settings = {key: value for key, value in values.items() if key not in STAGE_KEYS}
        for key in settings:
            if "." not in key:
                hint = did_you_mean(key, STAGE_KEYS) or f"write section.setting, or one of {', '.join(STAGE_KEYS)}"
                self._refuse((*at, key), "this is no setting, and nothing that a stage has", hint)
        source, iteration = self._named(values, "from", at, before)
        after, _ = self._named(values, "after", at, before)
        if source is not None and after is not None:
            self._refuse((*at, "after"), "a stage has `from` or `after`", "leave one out")
        begins = None if source is None else self._begins_at(source, iteration, (*at, "from"))
        own = settings
        if "decay" in values:
            own = self._decay(values["decay"], source, begins, (*at, "decay")) | settings
        path = self._path
        if "config" in values:
            path = self._path.parent / str(values["config"])
        load = None
        if source is not None and resolve.read_trainer(path) != "command":  # which has no setting for it
            load = f"{source.config.run_dir}" + ("" if iteration is None else f":{iteration}")
        config, given = self._run(name, own, at, path=path, load=load)
        from_zero = False
        if source is not None:
            if config.trainer not in ("command", source.config.trainer):
                words = f"trainer {config.trainer} does not go on from a checkpoint of trainer {source.config.trainer}"
                self._refuse((*at, "from"), words, "let both have one trainer")
            from_zero = _counts_from_zero(source.config, config)
            last = last_iteration(config)
            if begins is not None and last is not None and not from_zero and begins >= last:
                words = f"{source.name} stands at iteration {begins} there, and {name} ends at {last}"
                self._refuse(at, words, "raise training.steps of this stage, or set checkpoint.finetune")
            self._check_data(source, config, (*at, "from"))
            if "decay" in values:
                self._check_decay(source, config, (*at, "decay"))
        return CampaignRunDescription(
            name=name,
            run_dir=config.run_dir or "",
            config=config,
            given=given,
            settings=own,
            source=None if source is None else source.name,
            iteration=iteration,
            after=None if after is None else after.name,
            counts_from_zero=from_zero,
        )

    def _named(
        self, values: dict[str, Any], key: str, at: Location, before: Mapping[str, CampaignRunDescription]
    ) -> tuple[CampaignRunDescription | None, int | None]:
        """Return the earlier stage that `from` or `after` names, and its iteration."""
        if key not in values:
            return None, None
        name, colon, number = str(values[key]).partition(":")
        found = before.get(name)
        if found is None:
            hint = did_you_mean(name, before) or "name a stage that stands above this one"
            self._refuse((*at, key), f"there is no stage {name!r} above this one", hint)
        if colon and (key == "after" or not number.isdecimal() or not int(number)):
            self._refuse((*at, key), f"{values[key]!r} names no stage, and no STAGE:ITERATION", 'from: "stable:800"')
        return found, int(number) if colon else None

    def _begins_at(self, source: CampaignRunDescription, iteration: int | None, at: Location) -> int | None:
        """Return the iteration of a stage's first checkpoint; None if only a program knows it."""
        last, config = last_iteration(source.config), source.config
        if iteration is None:
            return last
        if last is not None and iteration > last:
            self._refuse(at, f"{source.name} ends at iteration {last}", "name one that it reaches")
        interval = config.checkpoint.interval if isinstance(config, RunConfig) else None
        if interval and iteration % interval and iteration != last:
            words = f"{source.name} saves every {interval} iterations, and not at {iteration}"
            near = max(interval, iteration // interval * interval)
            self._refuse(at, words, f"name a multiple of its checkpoint.interval, such as {near}")
        return iteration

    def _decay(
        self, length: Any, source: CampaignRunDescription | None, begins: int | None, at: Location
    ) -> dict[str, Any]:
        """Return the settings of a decay to min_lr over `length` iterations, from the learning rate of `source`."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            self._refuse(at, f"{length!r} is no number of iterations", "write a whole number from 1 on")
        if source is None or begins is None:
            self._refuse(at, "a decay begins at a known iteration", 'add from: "STAGE:ITERATION"')
        rate = {name: value for name, value in source.settings.items() if name == "optimizer.lr"}
        return rate | {
            "optimizer.lr_decay_style": "WSD",
            "optimizer.lr_wsd_decay_steps": length,
            "optimizer.lr_decay_steps": None,
            "optimizer.lr_decay_tokens": None,
            "training.steps": begins + length,
            "training.stop_after": None,
        }

    def _check_decay(self, source: CampaignRunDescription, config: CommonConfig, at: Location) -> None:
        """Refuse a decay that does not begin at the constant learning rate of the stage before."""
        before, own = (getattr(each, "optimizer", None) for each in (source.config, config))
        if before is None or own is None:
            return
        if before.lr_decay_style != "constant":
            words = f"{source.name} has optimizer.lr_decay_style {before.lr_decay_style}: its rate has fallen already, "
            words += f"and would rise to {own.lr:g} again"
            self._refuse(at, words, f"set optimizer.lr_decay_style: constant in {source.name}")
        if before.lr != own.lr:
            words = f"{source.name} has optimizer.lr {before.lr:g}, and this decay would begin at {own.lr:g}"
            self._refuse(at, words, "leave optimizer.lr out here: the decay begins at the rate of the stage before")

    def _check_data(self, source: CampaignRunDescription, config: CommonConfig, at: Location) -> None:
        """Refuse another sample length, since the stage before counted samples of its own length."""
        before = source.config
        if not isinstance(before, RunConfig) or not isinstance(config, RunConfig):
            return
        anew = config.checkpoint.finetune or config.checkpoint.no_load_data
        lengths = before.training.seq_length, config.training.seq_length
        if lengths[0] != lengths[1] and not anew:
            words = f"training.seq_length is {lengths[0]} in {source.name} and {lengths[1]} here"
            self._refuse(at, words, "add checkpoint.no_load_data: true, and the data begin anew")


def last_iteration(config: CommonConfig) -> int | None:
    """Return the last iteration of a run; None if only its program knows it."""
    if isinstance(config, RunConfig):
        return config.training.end_iteration
    if isinstance(config, MegatronConfig):
        training = config.training
        return None if training is None else training.stop_after or training.steps
    return config.command.steps if isinstance(config, CommandConfig) else None


def settings_in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={yaml_file.value_in_line(value)}" for name, value in settings.items())


def _counts_from_zero(source: CommonConfig, config: CommonConfig) -> bool:
    """True if a run's iterations restart at 0, as for a program on another trainer's checkpoint."""
    if isinstance(config, CommandConfig):
        return not isinstance(source, CommandConfig)
    return config.checkpoint_section is not None and config.checkpoint_section.finetune


_PRODUCT = "write, for example: product: {optimizer.lr: [1e-3, 2e-3]}"
_LIST = "write, for example: list: [{model.num_layers: 12, model.hidden_size: 768}]"
