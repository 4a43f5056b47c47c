"""`relayrun config`, `diff`, `explain` and `adopt`: the settings of a run, their origins, differences and meanings, and
a run config from an existing launcher of Megatron-LM, with a table of every line."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relayrun.cli import add_set_option
from relayrun.config.compose import describe, resolve, yaml_file
from relayrun.config.compose.campaign import campaign_kind, describe_campaign
from relayrun.config.compose.describe import Setting
from relayrun.config.compose.resolve import config_differences
from relayrun.config.compose.schema import CommonConfig
from relayrun.config.compose.yaml_file import LocatedSettings, Location, dump_yaml
from relayrun.control.rundir.campaign import Campaign, is_campaign
from relayrun.control.rundir.find_runs import find_run, runs_folder
from relayrun.errors import ConfigError, combined_error, did_you_mean_path
from relayrun.files import write_atomic
from relayrun.submit.adopt import adopt
from relayrun.submit.launcher_overrides import SETTING_VARIABLES, TRAINER_VARIABLES
from relayrun.terminal import print_rows

ORIGIN_COLUMN = 60
"""Column of the origins, unless a value is longer."""
TEXT_WIDTH = 118


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun config`."""
    parser.add_argument(
        "name", metavar="CONFIG", help="run config, or RUN[:REVISION] for what a run was submitted with"
    )
    add_set_option(parser, "as for `relayrun submit`")
    parser.set_defaults(run=run_config)


def run_config(options: argparse.Namespace) -> int:
    """Print the settings as YAML that can be submitted, with the origin of each as a comment. Raises RelayrunError."""
    config, given = read_config(options.name, options.overrides)
    for line, location in setting_lines(config.model_dump(mode="json", exclude_none=True)):
        if location is None:
            print(line)
            continue
        print(line if given is None else f"{line:<{ORIGIN_COLUMN}} # {value_origin(given, location)}")
    return 0


def value_origin(given: LocatedSettings, location: Location) -> str:
    """Return the origin of a value: file (relative to the working directory if below it) and line, or an override."""
    values: Any = given.values
    for part in location:
        if not isinstance(values, dict) or part not in values:
            return "default"
        values = values[part]
    return (given.place(location) or "").removeprefix(f"{Path.cwd()}/")


def read_config(name: str, overrides: list[str]) -> tuple[CommonConfig, LocatedSettings | None]:
    """Return the config of a file or of RUN[:REVISION], and for a file its located settings. Raises RelayrunError."""
    if Path(name).is_file():
        given = resolve.read_settings(Path(name), overrides)
        return resolve.validate_settings(given), given
    if Path(name).suffix in (".yaml", ".yml"):
        raise ConfigError("there is no such config file", where=name, hint=did_you_mean_path(name) or None)
    text, colon, number = name.rpartition(":")
    run = find_run(text if colon and number.isdecimal() else name)
    revisions = run.revisions()
    wanted = int(number) if colon and number.isdecimal() else max(revisions, default=0)
    if wanted not in revisions:
        known = ", ".join(map(str, sorted(revisions))) or "none"
        words = f"this run has no revision {wanted} of its config; there are: {known}"
        hint = "without a number it is the newest one"
        raise ConfigError(words, where=run.config, hint=hint)
    if overrides:
        hint = "`relayrun resume RUN --set ... --dry-run` shows what it would become"
        raise ConfigError("--set belongs to a config file, not to a run", where=name, hint=hint)
    return resolve.read_resolved_config(run.config_revision(wanted)), None


def setting_lines(values: dict[str, Any], at: Location = ()) -> Iterator[tuple[str, Location | None]]:
    """Yield each setting as a line of YAML with its location; None for the name of a section."""
    for name, value in values.items():
        indent = "  " * len(at)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", None
            yield from setting_lines(value, (*at, name))
        else:
            yield f"{indent}{name}: {yaml_file.value_in_line(value)}", (*at, name)


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun explain`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a setting or a section: training.steps, checkpoint")
    parser.add_argument("--json-schema", action="store_true", help="print a JSON schema of run configs, for editors")
    parser.set_defaults(run=run_explain)


def run_explain(options: argparse.Namespace) -> int:
    """Print the requested settings. Raises ConfigError for an unknown setting."""
    if options.json_schema:
        print(json.dumps(describe.json_schema(), indent=2))
        return 0
    found = describe.describe_settings() if options.name is None else describe.find_setting(options.name)
    for setting in found:
        print(describe_setting(setting) if len(found) == 1 else setting_summary(setting))
    return 0


def describe_setting(setting: Setting) -> str:
    """Return a paragraph about one setting."""
    lines = [f"{setting.name}: {setting.type}, {_default_text(setting)}", *_wrapped_text(setting.words)]
    tables = (SETTING_VARIABLES, *TRAINER_VARIABLES.values())
    variables = [variable for table in tables for variable, name in table.items() if name == setting.name]
    if variables:
        lines.append(f"  In the launchers: {variables[0]}")
    if setting.name.partition(".")[0] == "job" and setting.name not in ("job.sbatch", "job.setup"):
        lines.append(f"  As an option of sbatch: --{setting.name.rpartition('.')[2].replace('_', '-')}")
    return "\n".join(lines)


def setting_summary(setting: Setting) -> str:
    """Return one line about a setting, indented by the depth of its section."""
    depth = "  " * setting.name.count(".")
    if setting.is_section:
        return "\n".join([f"{depth}{setting.name}", *_wrapped_text(setting.words, f"{depth}  ")])
    first = setting.words.partition(". ")[0].removesuffix(".")
    line = f"{setting.name.rpartition('.')[2]}: {setting.type}, {_default_text(setting)}" + (
        f"; {first}" if first else ""
    )
    return depth + textwrap.shorten(line, TEXT_WIDTH - len(depth), placeholder=" ...")


def _default_text(setting: Setting) -> str:
    return "must be given" if setting.default is None else f"default {setting.default}"


def _wrapped_text(words: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(words, TEXT_WIDTH, initial_indent=indent, subsequent_indent=indent)


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun diff`."""
    parser.add_argument("names", nargs=2, metavar="CONFIG", help="a run config, RUN[:REVISION], or a sweep or stages")
    parser.set_defaults(run=run_diff)


def _read_configs(name: str) -> dict[str, CommonConfig]:
    """Return the configs of a file, of a run, or of all runs of a sweep or of stages, by their names there."""
    if Path(name).is_file() and (kind := campaign_kind(resolve.read_settings(Path(name)))) is not None:
        return {run.name: run.config for run in describe_campaign(Path(name), kind=kind).runs}
    for folder in (Path(name), runs_folder() / name):
        if is_campaign(folder):
            return {each.name: read_config(each.run_dir, [])[0] for each in Campaign.load(folder).members}
    return {"": read_config(name, [])[0]}


def _member_differences(name: str, one: dict[str, CommonConfig], other: dict[str, CommonConfig]) -> list[str]:
    if name not in one or name not in other:
        return [f"{name}: only in the {'second' if name not in one else 'first'}"]
    return [f"{name}: {line}" for line in config_differences(one[name], other[name])]


def run_diff(options: argparse.Namespace) -> int:
    """Print a line for each setting that differs; return 1 if any does. Raises RelayrunError."""
    one, other = (_read_configs(name) for name in options.names)
    if len(one) == len(other) == 1:  # whatever their names
        found = config_differences(*one.values(), *other.values())
    else:
        found = [line for name in {**one, **other} for line in _member_differences(name, one, other)]
    print("\n".join(found) if found else "the settings of both are the same")
    return 1 if found else 0


def add_adopt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun adopt`."""
    parser.add_argument("launcher", type=Path, help="a launcher in Bash that starts pretrain_*.py; no line of it runs")
    parser.add_argument("--output", type=Path, help="the run config to write; default: configs/runs/NAME.yaml")
    parser.add_argument("--cluster", default="generic", help="the site of the run, a file of configs/clusters")
    parser.add_argument("--checkout", help="folder of Megatron-LM, in place of the launcher's own")
    parser.add_argument(
        "--env", metavar="NAME=VALUE", action="append", default=[], help="a variable that the launcher finds"
    )
    parser.add_argument("arguments", nargs="*", help="its arguments, right behind it")
    parser.set_defaults(run=run_adopt)


def run_adopt(options: argparse.Namespace) -> int:
    """Write the run config, and print the table of lines. Raises ConfigError for parts that nothing takes."""
    given = dict(text.partition("=")[::2] for text in options.env)
    if bad := [text for text in options.env if not text.partition("=")[0].isidentifier()]:
        raise ConfigError(f"{bad[0]!r} is no variable", where="--env", hint="write NAME=VALUE")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    given |= {str(number): text for number, text in enumerate(options.arguments, start=1)}
    found = adopt(options.launcher, outside | given, site=options.cluster, checkout=options.checkout)
    print_rows(
        ("line", "yours", "used", "why"),
        [[text if len(text) <= 90 else f"{text[:87]}..." for text in row] for row in found.rows],
    )
    if found.errors:
        raise combined_error(found.errors, "parts of the launcher are not taken")
    output = options.output or Path("configs", "runs", f"{found.settings['name']}.yaml")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(output, f"# Adopted from {options.launcher.resolve()}\n{dump_yaml(found.settings)}", new=True)
    except FileExistsError:
        raise ConfigError("exists already", where=output, hint="give another --output, or remove it") from None
    print(f"wrote {output}; next: relayrun check {output}")
    return 0
