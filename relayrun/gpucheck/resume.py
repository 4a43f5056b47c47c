"""The part `resume`: runs that are cut, and resumed by their chains, against one that is not, to the last bit.

| run | attempts |
|---|---|
| whole | one |
| sync | ended by SIGUSR2 between two saves; ended by SIGKILL behind a save that stood still; the rest |
| async | ended by SIGKILL behind a save beside training; the rest |

Each of them with `training.deterministic` and without it; all of them at the same time, since bits don't depend on the
time that they take. Compared are loss and gradient norm of every iteration, and in the end every bit of the weights
and of the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from relayrun.gpucheck import runs
from relayrun.gpucheck.setup import CheckFailed, Figures, Setup
from relayrun.rundir.run import Run

MODES = {"deterministic": True, "default": False}
CUTS = ("SIGUSR2", "SIGKILL", "asynchronous save")
HOOKS = "relayrun.gpucheck.programs.hooks"


def measure(setup: Setup, figures: Figures) -> None:
    """Run all of it; a mode whose runs fail leaves the other one. Raises CheckFailed at the end if one did."""
    started: dict[str, dict[str, runs.Chain]] = {}
    runs.real_data(setup)
    for mode in MODES:
        started[mode] = {name: runs.start(setup, f"{mode}-{name}", changes) for name, changes in plans(setup, mode)}
    failures = []
    for mode, chains in started.items():
        try:
            done = {name: chain.wait(setup.sizes.steps) for name, chain in chains.items()}
            figures.add(mode, compared(done["whole"], done["sync"], done["async"]))
        except CheckFailed as error:
            failures.append(str(error))
            figures.add(mode, {"failed": error.message})
        for chain in chains.values():
            chain.process.wait()
            runs.forget(chain.run)
    if failures:
        raise CheckFailed("; ".join(failures))


def plans(setup: Setup, mode: str) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return the runs of a mode, by name, with their sections."""
    sizes = setup.sizes
    # between two saves, and behind one
    early, late = sizes.interval // 2, sizes.interval + sizes.interval // 2
    plans: dict[str, tuple[bool, list[dict[str, Any]]]] = {
        "whole": (False, []),
        "sync": (False, [{"signal": "SIGUSR2", "iteration": early}, {"signal": "SIGKILL", "iteration": late}]),
        "async": (True, [{"signal": "SIGKILL", "saves": 1}]),
    }
    training = {
        "steps": sizes.steps,
        "micro_batch_size": sizes.resumed_batch,
        "global_batch_size": 2 * sizes.resumed_batch * setup.ranks,
        "seq_length": sizes.resumed_seq_length,
        "deterministic": MODES[mode],
    }
    return [
        (
            name,
            {
                "model": dict(sizes.resumed_model),
                "data": runs.real_data(setup),
                "training": training
                | {"hooks": [{"hook": f"{HOOKS}:Cut", "options": {"cuts": cuts}}, f"{HOOKS}:Digest"]},
                "checkpoint": {"interval": sizes.interval, "async_save": beside, "keep_last": 1},
            },
        )
        for name, (beside, cuts) in plans.items()
    ]


def compared(whole: Run, sync: Run, beside: Run) -> dict[str, Any]:
    """Hold the pieces of the runs against the whole one, by what cut them. Raises CheckFailed where none was cut."""
    expected = {line["iteration"]: line for line in runs.steps_of(whole, 1)}
    digest = _digest(whole)
    for run, attempts in ((whole, 1), (sync, 3), (beside, 2)):
        if len(run.attempt_numbers()) != attempts:
            raise CheckFailed(f"{run.path.name} has {len(run.attempt_numbers())} attempts, not {attempts}")
    pieces = ((sync, 2, None), (sync, 3, _digest(sync)), (beside, 2, _digest(beside)))
    found = {}
    for cut, (run, attempt, end) in zip(CUTS, pieces, strict=True):
        begin = run.attempt(attempt).read_begin()
        if begin is None or not begin.base_iteration:
            raise CheckFailed(f"attempt {attempt} of {run.path.name} began anew, it resumed nothing")
        earlier = difference(runs.steps_of(run, attempt - 1), expected)
        own = difference(runs.steps_of(run, attempt), expected)
        states = end in (None, digest)
        found[cut] = {
            "resumed_at": begin.base_iteration,
            "iterations": len(runs.steps_of(run, attempt)),
            "equal": own is None and states,
            "differed_before": earlier,
            "difference": own or (None if states else "weights or optimizer state at the end, losses are equal"),
        }
    return found


def difference(lines: Sequence[dict[str, Any]], expected: dict[int, dict[str, Any]]) -> str | None:
    """Return the first iteration whose loss or gradient norm is not the expected one, in words; None: all are."""
    if not lines:
        return "no iteration was trained"
    for line in lines:
        for name in ("loss", "grad_norm"):
            other = expected[line["iteration"]][name]
            if not _same(line[name], other):
                words = name.replace("grad_norm", "gradient norm")
                return f"{words} of iteration {line['iteration']}: {line[name]!r}, not {other!r}"
    return None


def _same(one: float, other: float) -> bool:
    """Whether two numbers have the same bits; what is no number counts as different, since it was no training."""
    return one == other and not math.isnan(one)


def _digest(run: Run) -> Any:
    notes = runs.notes_of(run, "digest")
    if not notes or notes[-1]["attempt"] != run.attempt_numbers()[-1]:
        raise CheckFailed(f"{run.path.name} left no digest of its end")
    return notes[-1]["ranks"]
