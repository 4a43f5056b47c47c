"""The account of a run: its node time by attempt, in total, and by cause of loss; and sums over its attempts.

An ended attempt never changes, so a look at many runs keeps its sums in the user's cache. What counts of it may change:
a later attempt may go back behind its steps. Kept sums are believed only for the same folders of attempts, the same
plan and code, and the same last iteration that counts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import relayrun
from relayrun.control.chain.budget import used_node_seconds
from relayrun.control.rundir.attempt import METRICS_NAME
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import ATTEMPTS_NAME, Run
from relayrun.files import file_identities, file_identity
from relayrun.trust import read_cache, write_cache
from relayrun.watch.goodput.attribution import (
    NEEDED_COLUMNS,
    CountedWork,
    Mask,
    MetricsBlock,
    attribute_time,
    read_metrics_blocks,
)
from relayrun.watch.goodput.facts import NodeAllocation, RunAllocations, read_run_facts
from relayrun.watch.goodput.ledger import LOST_PARTS, MICROSECONDS_PER_SECOND, PART_NAMES, START_PARTS, to_microseconds

WAIT_KINDS = ("queued", "back-off", "stopped")
"""Kinds of time without nodes: in the queue, in back-off after a failure, and without a submitted job."""
NOTHING_KEPT: dict[str, Any] = {"identity": "", "limit": 0, "sums": {"attempt": 0}}
"""Sums, what tells that none of their files has changed, and the last iteration of the newest attempt that counts."""
_CODE = (relayrun.__version__, *map(file_identity, sorted(Path(__file__).parent.glob("*.py"))))


@dataclass(frozen=True, kw_only=True)
class AllocationAccount:
    """Node time of one allocation. Parts are microseconds of all its nodes, times seconds since 1970."""

    allocation: NodeAllocation
    start: float
    end: float
    parts: dict[str, int]
    work: CountedWork
    stepped: int
    """Microseconds in which steps that count were computed, on any number of nodes."""
    waited: dict[str, int]
    """Microseconds before it: `queued`, in `back-off` after a failure, and `stopped` without a submitted job."""

    @property
    def attempt(self) -> int | None:
        return None if self.allocation.facts is None else self.allocation.facts.begin.attempt

    @property
    def allocated(self) -> int:
        """Microseconds of all its nodes."""
        return sum(self.parts.values())

    @property
    def cause(self) -> str:
        """Cause of the attempt's end, in one word."""
        return self.allocation.cause

    @property
    def blamed(self) -> Sequence[str]:
        """Nodes to which its end is attributed."""
        return [] if self.allocation.facts is None else self.allocation.facts.blamed


@dataclass(kw_only=True)
class LostTime:
    """Node time lost to one cause of ends, in microseconds of all nodes."""

    cause: str
    times: int = 0
    lost: int = 0
    """Steps computed again, hangs, failed starts, and the time between failure and end."""
    starts: int = 0
    """Starts of the following attempts, up to their first steps."""
    waited: int = 0
    """Microseconds without nodes before the following jobs: queue and back-off."""
    nodes: Counter[str] = field(default_factory=Counter)
    """Number of ends attributed to each node."""


@dataclass(frozen=True, kw_only=True)
class NodeTimeAccount:
    """Node time of a run. Parts are microseconds of all nodes."""

    run: Run
    plan: Plan
    allocations: Sequence[AllocationAccount]
    parts: dict[str, int]
    """By name, in the order of `ledger.PARTS`, including parts that are 0."""
    work: CountedWork
    waited: dict[str, int]
    """Microseconds without nodes, not multiplied by nodes."""
    losses: Sequence[LostTime]
    evaluated_outside: bool

    @property
    def allocated(self) -> int:
        """Microseconds of all allocated nodes: the sum of the parts."""
        return sum(each.allocated for each in self.allocations)

    @property
    def elapsed(self) -> int:
        """Microseconds from the first submission to the newest known time."""
        return to_microseconds(max(each.end for each in self.allocations)) - first_submit(self.allocations[0])

    @property
    def goodput(self) -> float:
        """Share of the allocated node time spent on steps that count."""
        return self.parts["step"] / self.allocated if self.allocated else 0.0

    @property
    def effective_training_time(self) -> float:
        """Share of the time since the first submission, queue included, in which steps that count were computed."""
        return sum(each.stepped for each in self.allocations) / self.elapsed if self.elapsed else 0.0

    @property
    def node_hours(self) -> float:
        return self.allocated / MICROSECONDS_PER_SECOND / 3600

    @property
    def tokens_per_node_hour(self) -> float | None:
        """Tokens of steps that count per allocated node hour; None if speeds are not measured."""
        return self.work.tokens / self.node_hours if self.work.tokens and self.allocated else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation over all allocated time; None if it is not measured."""
        return self._of_allocated(self.work.mfu_seconds)

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s per GPU over all allocated time; None if it is not measured."""
        return self._of_allocated(self.work.tflop_seconds)

    def _of_allocated(self, total: float) -> float | None:
        return total / (self.allocated / MICROSECONDS_PER_SECOND) if total and self.allocated else None


def account_for_run(
    run: Run,
    *,
    facts: RunAllocations | None = None,
    known: int = 0,
    seen: Callable[[NodeAllocation], Callable[[MetricsBlock, Mask], None]] | None = None,
    also: Sequence[str] = (),
) -> NodeTimeAccount:
    """Book the node time of a run but for its first `known` allocations. Raises RunDirError if no attempt has begun, or
    a record is damaged. `seen` returns an allocation's callback of `attribute_time`, `also` names columns for it."""
    facts = facts or read_run_facts(run)
    names = tuple(dict.fromkeys([*NEEDED_COLUMNS, *also]))
    found: list[AllocationAccount] = []
    for number, allocation in enumerate(facts.allocations[known:], known):
        own = allocation.facts
        blocks = () if own is None else read_metrics_blocks(f"{own.attempt.folder}/{METRICS_NAME}", names)
        booked = attribute_time(allocation, blocks, seen=None if seen is None else seen(allocation))
        found.append(
            AllocationAccount(
                allocation=allocation,
                start=booked.start / MICROSECONDS_PER_SECOND,
                end=booked.end / MICROSECONDS_PER_SECOND,
                parts=booked.parts,
                stepped=booked.stepped,
                work=booked.work,
                waited=divide_wait(allocation, facts.allocations[number - 1] if number else None),
            )
        )
    return NodeTimeAccount(
        run=run,
        plan=facts.plan,
        allocations=found,
        parts={name: sum(each.parts.get(name, 0) for each in found) for name in PART_NAMES},
        work=CountedWork(**{name: sum(getattr(each.work, name) for each in found) for name in vars(CountedWork())}),
        waited={name: sum(each.waited[name] for each in found) for name in WAIT_KINDS},
        losses=lost_time_by_cause(found),
        evaluated_outside=facts.evaluated_outside,
    )


def first_submit(first: AllocationAccount) -> int:
    """Return microseconds since 1970; the start if the submit is unknown."""
    submit = first.allocation.submit
    return to_microseconds(first.start if submit is None else min(first.start, submit))


def divide_wait(allocation: NodeAllocation, previous: NodeAllocation | None) -> dict[str, int]:
    """Divide the time without nodes before an allocation, in microseconds."""
    start = to_microseconds(allocation.start)
    submit = start if allocation.submit is None else min(start, to_microseconds(allocation.submit))
    if previous is None:
        return {"queued": start - submit, "back-off": 0, "stopped": 0}
    gap = max(0, start - to_microseconds(previous.end))
    stopped = min(gap, max(0, submit - to_microseconds(previous.end)))
    end = None if previous.facts is None else previous.facts.end
    delay = 0 if end is None else end.delay * MICROSECONDS_PER_SECOND
    back_off = min(gap - stopped, delay)
    return {"queued": gap - stopped - back_off, "back-off": back_off, "stopped": stopped}


def lost_time_by_cause(allocations: Sequence[AllocationAccount]) -> list[LostTime]:
    """Return the node time lost to each cause, largest first; a planned end costs only the next start."""
    found: dict[str, LostTime] = {}
    for number, each in enumerate(allocations):
        if each.cause == "running":
            continue
        loss = found.setdefault(each.cause, LostTime(cause=each.cause))
        loss.times += 1
        loss.lost += sum(amount for part, amount in each.parts.items() if part in LOST_PARTS)
        loss.nodes.update(each.blamed)
        if number + 1 < len(allocations):
            following = allocations[number + 1]
            loss.starts += sum(amount for part, amount in following.parts.items() if part in START_PARTS)
            loss.waited += following.waited["queued"] + following.waited["back-off"]
    return sorted(found.values(), key=lambda loss: (-(loss.lost + loss.starts), loss.cause))


def read_attempt_sums(run: Run, plan: Plan, *, now: float) -> Counter[str]:
    """Return sums over all attempts of a run. Raises RunDirError if none has begun, or a record is damaged.

    `end CAUSE` and `restart CAUSE` are numbers; `part NAME`, `wait KIND`, `stepped` and `used` (node time that counts
    against a budget) are microseconds, as are the first submit, `begin`, and the newest time, `end`, since 1970.
    """
    name = hashlib.sha256(str(run.path.absolute()).encode()).hexdigest()
    # in a folder whole files are made or replaced; the metrics are appended to
    attempts = run.attempt_numbers()
    paths = [path for number in attempts for path in (f"{number:04}", f"{number:04}/{METRICS_NAME}")]
    identities = file_identities(f"{run.path}/{ATTEMPTS_NAME}", paths) if paths else []
    files = [*zip(attempts, identities[::2], identities[1::2], strict=True)]
    text = read_cache("runs", name)
    known = NOTHING_KEPT if text is None else json.loads(text)
    same = known["identity"] == _identity(run, files, known["sums"]["attempt"])
    for kept in (known, NOTHING_KEPT) if same else (NOTHING_KEPT,):
        found = read_run_facts(run, plan, now=now, ask=False, first=kept["sums"]["attempt"])
        facts = [each.facts for each in found.allocations if each.facts is not None]
        numbers = [each.begin.attempt for each in facts]
        if (numbers[0], facts[0].limit) == (kept["sums"]["attempt"], kept["limit"]):
            break
    sums, whole = Counter[str](kept["sums"]), kept is NOTHING_KEPT
    new = account_for_run(run, facts=found, known=not whole).allocations
    used = partial(used_node_seconds, run, plan, until=now)
    sums["used"] += to_microseconds(used(since=0.0 if whole else new[0].allocation.start))
    if len(new) > 1 and numbers == sorted(numbers):
        ended = _with_attempts(sums, new[:-1])
        ended["used"] -= to_microseconds(used(since=new[-1].allocation.start))
        identity = _identity(run, files, ended["attempt"])
        write_cache("runs", name, json.dumps({"identity": identity, "limit": facts[-2].limit, "sums": ended}).encode())
    return _with_attempts(sums, new)


def _identity(run: Run, files: Sequence[tuple[Any, ...]], attempt: int) -> str:
    """Return a hash of what the sums up to an attempt depend on; the next attempt's begin tells when its job ended."""
    own = [each for each in files if each[0] <= attempt]
    following = [file_identity(run.attempt(number).begin) for number, *_ in files[len(own) :][:1]]
    return hashlib.sha256(repr((_CODE, file_identity(run.plan), own, following)).encode()).hexdigest()


def _with_attempts(sums: Counter[str], accounts: Sequence[AllocationAccount]) -> Counter[str]:
    """Return the sums with those of the attempts that follow."""
    sums = Counter({"begin": first_submit(accounts[0])} | sums)
    for own in accounts:
        sums["attempt"], sums["end"] = own.attempt or 0, max(sums["end"], to_microseconds(own.end))
        sums.update({f"part {name}": amount for name, amount in own.parts.items()})
        sums.update({f"wait {name}": amount for name, amount in own.waited.items()})
        sums.update({f"end {own.cause}": 1, "stepped": own.stepped})
        for each in own.allocation.facts.failed_restarts if own.allocation.facts is not None else ():
            sums["restart " + ("node" if each.lost else "other" if each.rank is None else "rank")] += 1
    return sums
