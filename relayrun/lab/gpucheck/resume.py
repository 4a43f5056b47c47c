"""The part `resume`: runs that are cut, and resumed by their chains, against one that is not, to the last bit.

| run | attempts |
|---|---|
| whole | one |
| sync | ended by SIGUSR2 between two saves; ended by SIGKILL behind a save that stood still; the rest |
| async | ended by SIGKILL behind a save beside training; the rest |

Each of them with `training.deterministic` and without it; all of them at the same time, since bits don't depend on the
time that they take. Compared are the optimizer's state as it was loaded and after every iteration, loss and gradient
norm of every iteration, and the weights in the end.
"""

from __future__ import annotations

from typing import Any

from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.pieces import AttemptValues, first_difference, undisturbed_values
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures

RESUME_MODES = {"deterministic": True, "default": False}
CUT_NAMES = ("SIGUSR2", "SIGKILL", "asynchronous save")


def measure_resume(setup: CheckSetup, figures: PartFigures) -> None:
    """Run all of it; a mode whose runs fail leaves the other one. Raises CheckFailed at the end if one did."""
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
    """Return the runs of a mode, by name, with their sections."""
    sizes = setup.sizes
    # between two saves, and behind one
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
    """Hold the pieces of the runs against the whole one, by what cut them. Raises CheckFailed where none was cut."""
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
