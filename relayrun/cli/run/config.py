"""`relayrun config`: the resolved settings of a run config or of a run, each with the place it comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relayrun.config.compose import compose, yaml_file
from relayrun.config.compose.schema import CommonConfig
from relayrun.config.compose.yaml_file import LocatedSettings, Location
from relayrun.control.rundir.find_runs import find_run
from relayrun.errors import ConfigError, did_you_mean_path

ORIGIN_COLUMN = 60
"""Where the places begin, for values that are no longer."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun config`."""
    parser.add_argument(
        "name", metavar="CONFIG", help="run config, or RUN[:REVISION] for what a run was submitted with"
    )
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE", help="as for `relayrun submit`"
    )
    parser.set_defaults(run=run_config)


def run_config(options: argparse.Namespace) -> int:
    """Print the settings as YAML that could be submitted again, with a comment behind each. Raises RelayrunError."""
    config, given = read_config(options.name, options.overrides)
    for line, location in setting_lines(config.model_dump(mode="json", exclude_none=True)):
        if location is None:
            print(line)
            continue
        print(line if given is None else f"{line:<{ORIGIN_COLUMN}} # {value_origin(given, location)}")
    return 0


def value_origin(given: LocatedSettings, location: Location) -> str:
    """Where a value was written: a file (from the working directory, where it lies below) and line, or an override."""
    values: Any = given.values
    for part in location:
        if not isinstance(values, dict) or part not in values:
            return "default"
        values = values[part]
    return (given.place(location) or "").removeprefix(f"{Path.cwd()}/")


def read_config(name: str, overrides: list[str]) -> tuple[CommonConfig, LocatedSettings | None]:
    """The config that a file, or RUN[:REVISION], means, and of a file where its values stand. Raises RelayrunError."""
    if Path(name).is_file():
        given = compose.read_settings(Path(name), overrides)
        return compose.validate_settings(given), given
    if Path(name).suffix in (".yaml", ".yml"):
        raise ConfigError("there is no such config file", where=name, hint=did_you_mean_path(name) or None)
    text, colon, number = name.rpartition(":")
    run = find_run(text if colon and number.isdecimal() else name)
    revisions = run.revisions()
    wanted = int(number) if colon and number.isdecimal() else max(revisions, default=0)
    if wanted not in revisions:
        known = ", ".join(map(str, sorted(revisions))) or "none"
        raise ConfigError(
            f"this run has no revision {wanted} of its config; there are: {known}",
            where=run.config,
            hint="without a number it is the newest one",
        )
    if overrides:
        hint = "`relayrun resume RUN --set ... --dry-run` shows what it would become"
        raise ConfigError("--set belongs to a config file, not to a run", where=name, hint=hint)
    return compose.read_resolved_config(run.config_revision(wanted)), None


def setting_lines(values: dict[str, Any], at: Location = ()) -> Iterator[tuple[str, Location | None]]:
    """Each setting as a line of YAML, with its location; a section's name has none."""
    for name, value in values.items():
        indent = "  " * len(at)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", None
            yield from setting_lines(value, (*at, name))
        else:
            yield f"{indent}{name}: {yaml_file.value_in_line(value)}", (*at, name)
