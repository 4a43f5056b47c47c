"""Sums over the attempts of a run. Those of ended attempts are kept in the user's cache: a look at many runs reads the
newest attempts of each.

An ended attempt never changes, but what counts of it does: a later one may go back behind its steps. Kept sums are
believed only for the same folders of attempts, the same plan and code, and the same last iteration that counts.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import relayrun
from relayrun.control.chain.budget import used_node_seconds
from relayrun.control.rundir.attempt import METRICS_NAME
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.files import file_identity
from relayrun.user_cache import read_cache, write_cache
from relayrun.watch.goodput.account import AllocationAccount, account_for_run
from relayrun.watch.goodput.facts import AttemptFacts, read_run_facts
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, to_microseconds

NOTHING: dict[str, Any] = {"identity": "", "limit": 0, "sums": {"attempt": 0}}
"""Kept sums: what tells that no file has changed, and the last iteration of their newest attempt that counts."""


def read_attempt_sums(run: Run, plan: Plan, *, now: float) -> Counter[str]:
    """Return sums over all attempts of a run. Raises RunDirError if none has begun, or a record is damaged.

    `end CAUSE` and `restart CAUSE` are numbers; `part NAME`, `wait KIND`, `stepped` and `used` (of a budget of node
    hours) are microseconds, as are the first submit, `begin`, and the newest time, `end`, since 1970. `attempt` is the
    newest attempt.
    """
    name, files = hashlib.sha256(str(run.path.absolute()).encode()).hexdigest(), _file_identities(run)
    text = read_cache("runs", name)
    kept = NOTHING if text is None else json.loads(text)
    if kept["identity"] != _identity(run, files, kept["sums"]["attempt"]):
        kept = NOTHING
    accounts, facts = _read(run, plan, now, first=kept["sums"]["attempt"])
    if kept is not NOTHING and (facts[0].begin.attempt, facts[0].limit) != (kept["sums"]["attempt"], kept["limit"]):
        kept, (accounts, facts) = NOTHING, _read(run, plan, now, first=0)
    sums, new = Counter[str](kept["sums"]), accounts[kept is not NOTHING :]
    numbers = [each.begin.attempt for each in facts]
    if len(new) > 1 and numbers == sorted(numbers):
        _add(sums, new[:-1], run, plan, now)
        new, last = new[-1:], facts[-2]
        kept = {"identity": _identity(run, files, last.begin.attempt), "limit": last.limit, "sums": sums}
        write_cache("runs", name, json.dumps(kept).encode())
    _add(sums, new, run, plan, now)
    return sums


def _read(
    run: Run, plan: Plan, now: float, *, first: int
) -> tuple[Sequence[AllocationAccount], Sequence[AttemptFacts]]:
    facts = read_run_facts(run, now=now, ask=False, first=first, plan=plan)
    found = account_for_run(run, facts=facts).allocations
    return found, [each.allocation.facts for each in found if each.allocation.facts is not None]


def _file_identities(run: Run) -> list[tuple[Any, ...]]:
    """Return what tells of each attempt that no file of its folder was made or replaced, and no metrics written."""
    attempts = [(number, run.attempt(number).folder) for number in run.attempt_numbers()]
    return [(number, file_identity(path), file_identity(f"{path}/{METRICS_NAME}")) for number, path in attempts]


def _identity(run: Run, files: Sequence[tuple[Any, ...]], attempt: int) -> str:
    """Return a hash of what the sums up to an attempt depend on; the next attempt's begin tells when its job ended."""
    own = [each for each in files if each[0] <= attempt]
    following = [file_identity(run.attempt(number).begin) for number, *_ in files[len(own) :][:1]]
    return hashlib.sha256(repr((_code(), file_identity(run.plan), own, following)).encode()).hexdigest()


@functools.cache
def _code() -> list[Any]:
    return [relayrun.__version__, *map(file_identity, sorted(Path(__file__).parent.glob("*.py")))]


def _add(sums: Counter[str], accounts: Sequence[AllocationAccount], run: Run, plan: Plan, now: float) -> None:
    """Add the attempts that follow those in the sums."""
    for own in accounts:
        sums.setdefault("begin", to_microseconds(own.submit))
        sums["end"] = max(sums["end"], to_microseconds(own.end))
        sums.update({f"part {name}": amount for name, amount in own.parts.items()})
        sums.update({f"wait {name}": amount for name, amount in own.waited.items()})
        sums.update({f"end {own.cause}": 1, "stepped": own.stepped})
        for each in own.allocation.facts.failed_restarts if own.allocation.facts is not None else ():
            sums["restart " + ("node" if each.lost else "other" if each.rank is None else "rank")] += 1
    newest = max((own.attempt or 0 for own in accounts), default=sums["attempt"])
    if plan.chain.max_node_hours is not None:
        before, after = (used_node_seconds(run, plan, until=now, behind=each) for each in (sums["attempt"], newest))
        sums["used"] += round((before - after) * MICROSECONDS_PER_SECOND)
    sums["attempt"] = newest
