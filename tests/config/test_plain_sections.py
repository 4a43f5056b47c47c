"""Sections that jobs read without pydantic: the same values pass and fail at the submit and in a job."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from relayrun.config.sections.chain import ChainSection, NodeHealthLimits
from relayrun.config.sections.dataclass_section import read_section

ROOT = Path(__file__).resolve().parents[2]
GOOD: list[dict[str, Any]] = [
    {},
    {"grace_period": "auto", "signal_seconds": 7, "triggers_group": "users"},
    {"node_health_limits": {"tmp_gb": 8, "open_files": 2}, "node_health_command": ["/opt/check", "--quick"]},
    {"node_health_limits": {"tmp_gb": 0, "clock_seconds": 0.25, "command_seconds": 40}},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_failed_attempts": 0}, "chain.max_failed_attempts"),
    ({"max_failed_attempts": True}, "chain.max_failed_attempts"),
    ({"max_failed_attempts": "3"}, "chain.max_failed_attempts"),
    ({"max_failed_attempts": 3.0}, "chain.max_failed_attempts"),
    ({"auto_requeue": 1}, "chain.auto_requeue"),
    ({"mode": "often"}, "chain.mode"),
    ({"grace_period": "later"}, "chain.grace_period"),
    ({"grace_period": 0}, "chain.grace_period"),
    ({"triggers_group": 100}, "chain.triggers_group"),
    ({"node_health_command": "check"}, "chain.node_health_command"),
    ({"node_health_command": ["a", 1]}, "chain.node_health_command[1]"),
    ({"node_health_command": ["a\nb"]}, "chain.node_health_command[0]"),
    ({"node_health_limits": []}, "chain.node_health_limits"),
    ({"node_health_limits": {"clock_seconds": 0}}, "chain.node_health_limits.clock_seconds"),
    ({"node_health_limits": {"command_seconds": 41}}, "chain.node_health_limits.command_seconds"),
    ({"node_health_limits": {"tmp_gb": None}}, "chain.node_health_limits.tmp_gb"),
]


@pytest.mark.parametrize("values", GOOD)
def test_pydantic_and_a_job_read_the_same_section(values: dict[str, Any]) -> None:
    section = TypeAdapter(ChainSection).validate_python(values)
    assert read_section(ChainSection, values, "chain") == section
    assert read_section(ChainSection, json.loads(json.dumps(dataclasses.asdict(section))), "chain") == section


@pytest.mark.parametrize(("values", "where"), BAD)
def test_both_refuse_what_is_wrong_and_the_job_names_the_setting(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ChainSection).validate_python(values)
    with pytest.raises(ValueError, match=f"^{re.escape(where)}: "):
        read_section(ChainSection, values, "chain")


def test_a_name_that_a_job_does_not_know_is_left_out_and_a_submit_refuses_it() -> None:
    assert read_section(ChainSection, {"of_a_later_version": 1}, "chain") == ChainSection()
    with pytest.raises(ValidationError):
        TypeAdapter(ChainSection).validate_python({"of_a_later_version": 1})


def test_defaults_are_within_their_own_limits() -> None:
    for kind in (ChainSection, NodeHealthLimits):
        values = json.loads(json.dumps(dataclasses.asdict(kind())))
        assert read_section(kind, values, "defaults") == kind()


def test_a_section_is_read_without_installed_packages() -> None:
    program = (
        "import sys; from relayrun.config.sections.chain import ChainSection\n"
        "from relayrun.config.sections.dataclass_section import read_section\n"
        "found = read_section(ChainSection, {'max_failed_attempts': 7}, 'chain')\n"
        "print(found.max_failed_attempts, 'pydantic' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, env={}, text=True, capture_output=True, check=True, timeout=60
    )
    assert answer.stdout == "7 False\n"
