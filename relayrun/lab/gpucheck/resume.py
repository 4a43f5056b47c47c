"""The parts `resume` and `recovery`: interrupted runs compared with an undisturbed run, to the last bit.

| part | run | interruption |
|---|---|---|
| resume | sync | SIGUSR2 between two saves; SIGKILL after a save |
| resume | async | SIGKILL after an asynchronous save |
| recovery | node | two deaths of ranks inside the job; `chain.recovery` is `node` |

The hook `programs.hooks.DigestHook` records the hashes of every attempt, and `compare_runs` compares them.
"""

from __future__ import annotations

from typing import Any

from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.lab.compare_runs import AttemptValues, first_difference
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures
from relayrun.lab.small_run import merge_sections

NODE_RECOVERY: dict[str, dict[str, Any]] = {"chain": {"recovery": "node"}, "checkpoint": {"memory_interval": 1}}
RESUME_MODES = {"deterministic": True, "default": False}
RECORDED_FIELDS = ("words", "iteration", "again", "source", "next_iteration", "steps_lost", "seconds")
"""Fields of a failed restart in the result; others name hosts."""
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
    found = []
    for name, (beside, cuts) in plans.items():
        sections = runs.recorded_run_sections(setup, cuts=cuts, deterministic=RESUME_MODES[mode])
        found.append((name, merge_sections(sections, {"checkpoint": {"async_save": beside}})))
    return found


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


def measure_recovery(setup: CheckSetup, figures: PartFigures) -> None:
    """Run both, and compare. Raises CheckFailed if a run does not finish, or has no digests."""
    ranks = setup.gpus or setup.sizes.cpu_ranks
    cuts = deaths_by_restart(setup, ranks)
    plain, cut = (runs.recorded_run_sections(setup, cuts=each, deterministic=True, ranks=ranks) for each in ([], cuts))
    whole = runs.start_run(setup, "recovery-whole", plain)
    disturbed = runs.start_run(setup, "recovery-restarts", merge_sections(cut, NODE_RECOVERY))
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
    """Return one cut per start of the ranks, for `SignalSelfHook`."""
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
    digests = [entry for entry in runs.read_notes(run, "digest") if entry["attempt"] == attempt]
    return AttemptValues.of(runs.iteration_lines(run, attempt), digests)
