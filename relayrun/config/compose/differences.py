"""What differs in the settings of two resolved configs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import CommonConfig


def config_differences(one: CommonConfig, other: CommonConfig) -> list[str]:
    """Return `name: value -> value` for each setting that differs."""
    first, second = (dict(_flat_settings(each.model_dump(mode="json"))) for each in (one, other))
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    return [
        f"{name}: {yaml_file.value_in_line(first.get(name))} -> {yaml_file.value_in_line(second.get(name))}"
        for name in names
    ]


def _flat_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
