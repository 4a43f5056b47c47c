"""`relayrun explain`: what a setting means, or all settings as a tree, or a JSON schema for editors."""

from __future__ import annotations

import argparse
import json
import textwrap

from relayrun.config.compose import describe
from relayrun.config.compose.describe import Setting
from relayrun.submit.launcher_environment import SETTING_VARIABLES, TRAINER_VARIABLES

TEXT_WIDTH = 118


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun explain`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a setting or a section: training.steps, checkpoint")
    parser.add_argument("--json-schema", action="store_true", help="print a JSON schema of run configs, for editors")
    parser.set_defaults(run=run_explain)


def run_explain(options: argparse.Namespace) -> int:
    """Print what was asked for. Raises ConfigError for a setting that there is not."""
    if options.json_schema:
        print(json.dumps(describe.json_schema(), indent=2))
        return 0
    found = describe.describe_settings() if options.name is None else describe.find_setting(options.name)
    for setting in found:
        print(describe_setting(setting) if len(found) == 1 else setting_summary(setting))
    return 0


def describe_setting(setting: Setting) -> str:
    """A paragraph on one setting."""
    lines = [f"{setting.name}: {setting.type}, {_default_text(setting)}", *_wrapped_text(setting.words)]
    tables = (SETTING_VARIABLES, *TRAINER_VARIABLES.values())
    variables = [variable for table in tables for variable, name in table.items() if name == setting.name]
    if variables:
        lines.append(f"  In the launchers: {variables[0]}")
    if setting.name.partition(".")[0] == "job" and setting.name not in ("job.sbatch", "job.setup"):
        lines.append(f"  As an option of sbatch: --{setting.name.rpartition('.')[2].replace('_', '-')}")
    return "\n".join(lines)


def setting_summary(setting: Setting) -> str:
    """A line on one setting of several, at the depth of its section."""
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
