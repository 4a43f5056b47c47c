"""What a chain decides, as tables over facts: the pure functions, whatever Slurm a machine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from relayrun.config.sections.chain import ChainSection
from relayrun.control import decisions
from relayrun.control.rundir.records import ChainEnd

BEGIN: dict[str, tuple[Any, ...]] = {
    "stopped": (None, ChainEnd("failed", "because of STOP")),
    "durable_iteration": (0, 10),
    "total_steps": (None, 10),
    "stop_after": (None, 5),
    "exit_trigger": (None, "ann"),
    "predecessor_cancelled": (False, True),
    "verdict": (None, ChainEnd("failed", "a verdict")),
    "failed_attempts": (0, 3),
}

END: dict[str, tuple[Any, ...]] = {
    "outcome": (None, "done", "saved", "exit", "fatal"),
    "hang": (None, "it hung"),
    "cancelled": (False, True),
    "durable_iteration": (5, 7, 10),
    "total_steps": (None, 10),
    "failed_attempts": (0, 2),
    "auto_requeue": (True, False),
    "reservation": ("", "it is over"),
}

DETAILS: list[dict[str, Any]] = [
    {"exit_code": 7},
    {"exit_code": decisions.UNKNOWN_EXIT_CODE},
    {"exit_code": 7, "failure": "rank 3 failed"},
    {"exit_code": decisions.UNKNOWN_EXIT_CODE, "failure": "node n3 was lost"},
    {"stop_after": 7, "outcome": "saved", "durable_iteration": 7},
    {"stop_after": 8, "outcome": "saved", "durable_iteration": 7},
    *({"failed_attempts": count, "max_failed_attempts": 99} for count in range(12)),
]
"""Further facts, one by one: words, the end that a config asks for, and delays."""

_BASE = {"exit_code": 0, "base_iteration": 5, "max_failed_attempts": 3}
_DEFAULT = {name: values[0] for name, values in END.items()} | _BASE


def _rows(values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _words(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())


def begins() -> Iterator[str]:
    """Yield a line for each combination of facts at the beginning of a job."""
    for facts in _rows(BEGIN):
        found = decisions.decide_at_start(decisions.StartFacts(**facts, chain=ChainSection()))
        yield f"{_words(facts)} -> {found.action} {found.chain_end}: {found.reason}"


def ends() -> Iterator[str]:
    """Yield a line for each combination of facts at the end of a job."""
    rows = [{**_DEFAULT, **facts} for facts in (*_rows(END), *DETAILS)]
    for facts in rows:
        facts["outcome_reason"] = "" if facts["outcome"] is None else f"rank 0 left: {facts['outcome']}"
        given = dict(facts)
        chain = ChainSection(**{name: given.pop(name) for name in ("auto_requeue", "max_failed_attempts")})
        known = decisions.EndFacts(**given, chain=chain)
        found = decisions.decide_at_end(known)
        what = f"{decisions.end_cause(known)}, {found.action} {found.chain_end} after {found.delay} s"
        yield f"{_words(facts)} -> {what}: {found.reason}"


def others() -> Iterator[str]:
    """Yield a line for each value of the remaining functions."""
    yield from (
        f"signal {lead} s -> {decisions.default_signal_seconds(lead)} s" for lead in (0.5, 60, 100, 119, 121, 600)
    )
    yield from (decisions.done_reason(7), decisions.stop_after_reason(7))
