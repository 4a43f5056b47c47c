"""`relayrun diff`: what differs in the settings of two run configs or runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from relayrun.cli import config
from relayrun.config import yamlfile
from relayrun.config.schema import CommonConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun diff`."""
    parser.add_argument("names", nargs=2, metavar="CONFIG", help="a run config, or RUN[:REVISION]")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each setting that differs; the exit code is 1 if any does. Raises RelayrunError."""
    found = differences(*(config.read(name, [])[0] for name in options.names))
    print("\n".join(found) if found else "the settings of both are the same")
    return 1 if found else 0


def differences(one: CommonConfig, other: CommonConfig) -> list[str]:
    """Return `name: value -> value` for each setting that differs."""
    first, second = (dict(_flat(each.model_dump(mode="json"))) for each in (one, other))
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    return [f"{name}: {yamlfile.in_line(first.get(name))} -> {yamlfile.in_line(second.get(name))}" for name in names]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
