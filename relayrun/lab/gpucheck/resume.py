"""The parts `resume` and `recovery`: interrupted runs compared with an undisturbed run, to the last bit.

| part | run | interruption |
|---|---|---|
| resume | sync | SIGUSR2 between two saves; SIGKILL after a save |
| resume | async | SIGKILL after an asynchronous save |
| recovery | node | two deaths of ranks inside the job; `chain.recovery` is `node` |

The hook `programs.hooks.DigestHook` records the hashes of every attempt, `AttemptValues` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures

COMPARED_VALUES = (("loss", "loss"), ("grad_norm", "gradient norm"))
"""Compared fields of metrics.jsonl, with names for people."""


@dataclass(frozen=True, kw_only=True)
class AttemptValues:
    """Values that one attempt computed. A digest has an entry for each rank."""

    lines: dict[int, dict[str, Any]]
    """Lines of metrics.jsonl by iteration."""
    states: dict[int, Any]
    """Digests of the optimizer state by iteration."""
    loaded: dict[int, Any]
    """Digests of the loaded optimizer states, of the attempt and of restarts in it, by iteration."""
    weights: dict[int, Any]
    """Digest of the final weights."""
    twice: list[str] = field(default_factory=list)
    """Values that differed when a restart computed them again, in words."""

    @classmethod
    def of(cls, run: Run, attempt: int) -> AttemptValues:
        """Read the records of an attempt."""
        notes = [entry for entry in runs.read_notes(run, "digest") if entry["attempt"] == attempt]
        twice: list[str] = []

        def digests(kind: str, words: str) -> dict[int, Any]:
            found = ((entry["iteration"], entry["ranks"]) for entry in notes if entry["kind"] == kind)
            return _first_values(found, words, twice)

        lines = runs.iteration_lines(run, attempt)
        for name, words in COMPARED_VALUES:
            _first_values(((line["iteration"], line[name]) for line in lines), words, twice)
        return cls(
            lines={line["iteration"]: line for line in lines},
            states=digests("state", "optimizer state"),
            loaded=digests("loaded", "optimizer state as loaded"),
            weights=digests("weights", "weights"),
            twice=twice,
        )


def _first_values(values: Iterable[tuple[int, Any]], words: str, twice: list[str]) -> dict[int, Any]:
    """The first value of each iteration; different later values are added to `twice`."""
    found: dict[int, Any] = {}
    for iteration, value in values:
        if found.setdefault(iteration, value) != value:
            twice.append(f"{words} of iteration {iteration}, when it was computed again")
    return found


def undisturbed_values(run: Run) -> AttemptValues:
    """Read the values of an uninterrupted run. Raises CheckFailed if it was interrupted, or has no digests."""
    if (attempts := len(run.attempt_numbers())) != 1:
        raise CheckFailed(f"{run.path.name} has {attempts} attempts, not 1")
    found = AttemptValues.of(run, 1)
    if not found.weights or len(found.states) != len(found.lines):
        raise CheckFailed(f"{run.path.name} left no digests of its states")
    return found


def first_difference(own: AttemptValues, expected: AttemptValues) -> str | None:
    """Return the first difference from the undisturbed run, in words, or None."""
    if not own.lines:
        return "no iteration was trained"
    for iteration, digest in own.loaded.items():
        if digest != expected.states[iteration]:
            return f"optimizer state as loaded, of iteration {iteration}"
    for iteration, line in own.lines.items():
        other = expected.lines[iteration]
        for name, words in COMPARED_VALUES:
            if line[name] != other[name] or math.isnan(line[name]):  # NaN never counts as equal
                return f"{words} of iteration {iteration}: {line[name]!r}, not {other[name]!r}"
        if own.states.get(iteration) != expected.states[iteration]:
            return f"optimizer state after iteration {iteration}, whose loss is equal"
    if own.twice:
        return own.twice[0]
    if any(expected.weights.get(iteration, digest) != digest for iteration, digest in own.weights.items()):
        return "weights in the end, where the optimizer's state is equal"
    return None


NODE_RECOVERY: dict[str, dict[str, Any]] = {"chain": {"recovery": "node"}, "checkpoint": {"memory_interval": 1}}


def measure_recovery(setup: CheckSetup, figures: PartFigures) -> None:
    """Run both, and compare. Raises CheckFailed if a run does not finish, or has no digests."""
    ranks = setup.gpus or setup.sizes.cpu_ranks
    cuts = deaths_by_restart(setup, ranks)
    sections = runs.recorded_run_sections(setup, cuts=cuts, deterministic=True, ranks=ranks)
    whole = runs.start_run(
        setup, "recovery-whole", runs.recorded_run_sections(setup, cuts=[], deterministic=True, ranks=ranks)
    )
    disturbed = runs.start_run(setup, "recovery-rounds", runs.merge_sections(sections, NODE_RECOVERY))
    try:
        disturbed.process.wait()
        figures.add("job", recorded_attempts(disturbed.run) | {"ranks": ranks, "kills": len(cuts)})
        expected = undisturbed_values(whole.wait(setup.sizes.steps))
        figures.add("bits", compare_recovered_run(disturbed.wait(setup.sizes.steps), expected))
    finally:
        for chain in (whole, disturbed):
            chain.process.wait()
            runs.remove_checkpoints(chain.run)


def deaths_by_restart(setup: CheckSetup, ranks: int) -> list[dict[str, Any]]:
    """Return one cut per start of the ranks, for `CutHook`."""
    interval = setup.sizes.interval
    between, later = interval + interval // 2, 2 * interval + interval // 2
    return [
        {"signal": "SIGKILL", "iteration": between, "rank": ranks - 1},
        {"signal": "SIGKILL", "iteration": later, "rank": 0, "before_update": True},
    ]


def recorded_attempts(run: Run) -> dict[str, Any]:
    """Return the records of the run's attempts and failed starts, oldest first, without host names."""
    numbers = run.attempt_numbers()
    return {
        "attempts": len(numbers),
        "rounds": [
            {
                "attempt": number,
                "words": failed.words,
                "iteration": failed.iteration,
                "again": failed.again,
                "source": failed.source,
                "next_iteration": failed.next_iteration,
                "steps_lost": failed.steps_lost,
                "seconds": failed.seconds,
            }
            for number in numbers
            for failed in restarts.read_failed_restarts(run.attempt(number))
        ],
    }


def compare_recovered_run(run: Run, expected: AttemptValues) -> dict[str, Any]:
    """Compare all attempts of a run with the undisturbed run. Raises CheckFailed without digests."""
    pieces = {number: AttemptValues.of(run, number) for number in run.attempt_numbers()}
    for number, piece in pieces.items():
        for failed in restarts.read_failed_restarts(run.attempt(number)):
            if failed.again and failed.next_iteration and failed.next_iteration not in piece.loaded:
                raise CheckFailed(f"the round behind round {failed.round} left no digest of what it loaded")
    trained = {iteration for piece in pieces.values() for iteration in piece.lines}
    if trained != expected.lines.keys() or not any(piece.weights for piece in pieces.values()):
        raise CheckFailed(f"{run.path.name} left no record of every iteration, or no digest of its weights")
    found = [different for piece in pieces.values() if (different := first_difference(piece, expected)) is not None]
    return {"iterations": len(trained), "equal": not found, "difference": found[0] if found else None}


RESUME_MODES = {"deterministic": True, "default": False}
CUT_NAMES = ("SIGUSR2", "SIGKILL", "asynchronous save")


def measure_resume(setup: CheckSetup, figures: PartFigures) -> None:
    """Run both modes; a mode that fails leaves the other. Raises CheckFailed at the end if one failed."""
    started: dict[str, dict[str, runs.LocalChain]] = {}
    runs.data_with_tokenizer(setup)
    for mode in RESUME_MODES:
        started[mode] = {
            name: runs.start_run(setup, f"{mode}-{name}", changes) for name, changes in resume_run_sections(setup, mode)
        }
    failures = []
    for mode, chains in started.items():
        try:
            done = {name: chain.wait(setup.sizes.steps) for name, chain in chains.items()}
            figures.add(mode, compare_resumed_runs(done["whole"], done["sync"], done["async"]))
        except CheckFailed as error:
            failures.append(str(error))
            figures.add(mode, {"failed": error.message})
        for chain in chains.values():
            chain.process.wait()
            runs.remove_checkpoints(chain.run)
    if failures:
        raise CheckFailed("; ".join(failures))


def resume_run_sections(setup: CheckSetup, mode: str) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return names and sections of the runs of a mode."""
    sizes = setup.sizes
    # between two saves, and after one
    early, late = sizes.interval // 2, sizes.interval + sizes.interval // 2
    plans: dict[str, tuple[bool, list[dict[str, Any]]]] = {
        "whole": (False, []),
        "sync": (False, [{"signal": "SIGUSR2", "iteration": early}, {"signal": "SIGKILL", "iteration": late}]),
        "async": (True, [{"signal": "SIGKILL", "saves": 1}]),
    }
    return [
        (
            name,
            runs.merge_sections(
                runs.recorded_run_sections(setup, cuts=cuts, deterministic=RESUME_MODES[mode]),
                {"checkpoint": {"async_save": beside}},
            ),
        )
        for name, (beside, cuts) in plans.items()
    ]


def compare_resumed_runs(whole: Run, sync: Run, beside: Run) -> dict[str, Any]:
    """Compare the attempts after each cut with the undisturbed run. Raises CheckFailed if a run was not cut."""
    expected = undisturbed_values(whole)
    for run, attempts in ((sync, 3), (beside, 2)):
        if len(run.attempt_numbers()) != attempts:
            raise CheckFailed(f"{run.path.name} has {len(run.attempt_numbers())} attempts, not {attempts}")
    found = {}
    for cut, (run, attempt) in zip(CUT_NAMES, ((sync, 2), (sync, 3), (beside, 2)), strict=True):
        begin = run.attempt(attempt).read_begin()
        if begin is None or not begin.base_iteration:
            raise CheckFailed(f"attempt {attempt} of {run.path.name} began anew, it resumed nothing")
        own = AttemptValues.of(run, attempt)
        if begin.base_iteration not in own.loaded:
            raise CheckFailed(f"attempt {attempt} of {run.path.name} left no digest of what it loaded")
        different = first_difference(own, expected)
        found[cut] = {
            "resumed_at": begin.base_iteration,
            "iterations": len(own.lines),
            "equal": different is None,
            "differed_before": first_difference(AttemptValues.of(run, attempt - 1), expected),
            "difference": different,
        }
    return found
