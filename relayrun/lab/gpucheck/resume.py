"""The part `resume`: interrupted runs compared with undisturbed ones, to the last bit. All are deterministic.

| run | interruption |
|---|---|
| sync | SIGUSR2 between two saves; SIGKILL after a save |
| async | SIGKILL after an asynchronous save |
| recovered | two deaths of ranks inside the job; `chain.recovery` is `node` |

The hook `programs.hooks.DigestHook` records the hashes of every attempt, and `compare_runs` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.lab.compare_runs import AttemptValues, first_difference
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import DIGESTS_FILE, CheckFailed, CheckSetup, PartFigures
from relayrun.lab.small_run import merge_sections

RECORDED_FIELDS = ("words", "iteration", "again", "source", "next_iteration", "steps_lost", "seconds")
"""Fields of a failed restart in the result; others name hosts."""
CUT_NAMES = ("SIGUSR2", "SIGKILL", "asynchronous save")


def measure_resume(setup: CheckSetup, figures: PartFigures) -> None:
    """Run all at once, and compare; a run that fails leaves the others. Raises CheckFailed at the end if one failed."""
    runs.data_with_tokenizer(setup)
    chains = {name: runs.start_run(setup, name, sections) for name, sections in resume_run_sections(setup).items()}

    def done(name: str) -> Run:
        return chains[name].wait(setup.sizes.steps)

    failures = []
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "resumed": lambda: compare_resumed_runs(done("whole"), done("sync"), done("async")),
        "job": lambda: recorded_attempts(ended(chains["recovered"])) | {"ranks": setup.ranks, "kills": 2},
        "bits": lambda: compare_recovered_run(done("recovered"), undisturbed_values(done("whole"))),
    }
    for name, measure in measures.items():
        try:
            figures.add(name, measure())
        except CheckFailed as error:
            failures.append(error.message)
    for chain in chains.values():
        runs.remove_checkpoints(ended(chain))
    if failures:
        raise CheckFailed("; ".join(failures))


def ended(chain: runs.LocalChain) -> Run:
    """Wait for the end of a chain, whatever it is."""
    chain.process.wait()
    return chain.run


def resume_run_sections(setup: CheckSetup) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the sections of the undisturbed run and of the interrupted ones, by name."""
    interval = setup.sizes.interval
    half, last = interval // 2, setup.ranks - 1  # half: between two saves
    plans: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
        "whole": ({}, []),
        "sync": ({}, [{"signal": "SIGUSR2", "iteration": half}, {"signal": "SIGKILL", "iteration": interval + half}]),
        "async": ({"checkpoint": {"async_save": True}}, [{"signal": "SIGKILL", "saves": 1}]),
        "recovered": (
            {"chain": {"recovery": "node"}, "checkpoint": {"memory_interval": 1}},
            [
                {"signal": "SIGKILL", "iteration": interval + half, "rank": last},
                {"signal": "SIGKILL", "iteration": 2 * interval + half, "rank": 0, "before_update": True},
            ],
        ),
    }
    return {
        name: merge_sections(runs.recorded_run_sections(setup, cuts=cuts), changes)
        for name, (changes, cuts) in plans.items()
    }


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
        own = attempt_values(run, attempt)
        if begin.base_iteration not in own.loaded:
            raise CheckFailed(f"attempt {attempt} of {run.path.name} left no digest of what it loaded")
        different = first_difference(own, expected)
        found[cut] = {
            "resumed_at": begin.base_iteration,
            "iterations": len(own.lines),
            "equal": different is None,
            "differed_before": first_difference(attempt_values(run, attempt - 1), expected),
            "difference": different,
        }
    return found


def recorded_attempts(run: Run) -> dict[str, Any]:
    """Return the records of the run's attempts and failed starts, oldest first, without host names."""
    numbers = run.attempt_numbers()
    return {
        "attempts": len(numbers),
        "restarts": [
            {"attempt": number} | {name: getattr(failed, name) for name in RECORDED_FIELDS}
            for number in numbers
            for failed in restarts.read_failed_restarts(run.attempt(number))
        ],
    }


def compare_recovered_run(run: Run, expected: AttemptValues) -> dict[str, Any]:
    """Compare all attempts of a run with the undisturbed run. Raises CheckFailed without digests."""
    pieces = {number: attempt_values(run, number) for number in run.attempt_numbers()}
    for number, piece in pieces.items():
        for failed in restarts.read_failed_restarts(run.attempt(number)):
            if failed.again and failed.next_iteration and failed.next_iteration not in piece.loaded:
                raise CheckFailed(f"the restart behind restart {failed.restart} left no digest of what it loaded")
    trained = {iteration for piece in pieces.values() for iteration in piece.lines}
    if trained != expected.lines.keys() or not any(piece.weights for piece in pieces.values()):
        raise CheckFailed(f"{run.path.name} left no record of every iteration, or no digest of its weights")
    found = [different for piece in pieces.values() if (different := first_difference(piece, expected)) is not None]
    return {"iterations": len(trained), "equal": not found, "difference": found[0] if found else None}


def undisturbed_values(run: Run) -> AttemptValues:
    """Read the values of an uninterrupted run. Raises CheckFailed if it was interrupted, or has no digests."""
    if (attempts := len(run.attempt_numbers())) != 1:
        raise CheckFailed(f"{run.path.name} has {attempts} attempts, not 1")
    found = attempt_values(run, 1)
    if not found.weights or len(found.states) != len(found.lines):
        raise CheckFailed(f"{run.path.name} left no digests of its states")
    return found


def attempt_values(run: Run, attempt: int) -> AttemptValues:
    """Return the values of an attempt, with the digests of `DigestHook`."""
    digests = [entry for entry in read_json_lines(run.path / DIGESTS_FILE) if entry["attempt"] == attempt]
    return AttemptValues.of(runs.iteration_lines(run, attempt), digests)
