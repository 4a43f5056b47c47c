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

import math
from dataclasses import dataclass
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
                | {"hooks": [f"{HOOKS}:Digest", {"hook": f"{HOOKS}:Cut", "options": {"cuts": cuts}}]},
                "checkpoint": {"interval": sizes.interval, "async_save": beside, "keep_last": 1},
            },
        )
        for name, (beside, cuts) in plans.items()
    ]


def compared(whole: Run, sync: Run, beside: Run) -> dict[str, Any]:
    """Hold the pieces of the runs against the whole one, by what cut them. Raises CheckFailed where none was cut."""
    for run, attempts in ((whole, 1), (sync, 3), (beside, 2)):
        if len(run.attempt_numbers()) != attempts:
            raise CheckFailed(f"{run.path.name} has {len(run.attempt_numbers())} attempts, not {attempts}")
    expected = Piece.of(whole, 1)
    if not expected.weights or len(expected.states) != len(expected.lines):
        raise CheckFailed(f"{whole.path.name} left no digests of its states")
    found = {}
    for cut, (run, attempt) in zip(CUTS, ((sync, 2), (sync, 3), (beside, 2)), strict=True):
        begin = run.attempt(attempt).read_begin()
        if begin is None or not begin.base_iteration:
            raise CheckFailed(f"attempt {attempt} of {run.path.name} began anew, it resumed nothing")
        own = Piece.of(run, attempt)
        if begin.base_iteration not in own.loaded:
            raise CheckFailed(f"attempt {attempt} of {run.path.name} left no digest of what it loaded")
        different = difference(own, expected)
        found[cut] = {
            "resumed_at": begin.base_iteration,
            "iterations": len(own.lines),
            "equal": different is None,
            "differed_before": difference(Piece.of(run, attempt - 1), expected),
            "difference": different,
        }
    return found


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one attempt computed. A digest has an entry for each rank."""

    lines: dict[int, dict[str, Any]]
    """The lines of metrics.jsonl by iteration."""
    states: dict[int, Any]
    """Digests of the optimizer's state by iteration."""
    loaded: dict[int, Any]
    """The one that it began with."""
    weights: dict[int, Any]
    """The digest of the weights that it ended with."""

    @classmethod
    def of(cls, run: Run, attempt: int) -> Piece:
        """Read what an attempt left."""
        notes = [entry for entry in runs.notes_of(run, "digest") if entry["attempt"] == attempt]

        def digests(kind: str) -> dict[int, Any]:
            return {entry["iteration"]: entry["ranks"] for entry in notes if entry["kind"] == kind}

        lines = {line["iteration"]: line for line in runs.steps_of(run, attempt)}
        return cls(lines=lines, states=digests("state"), loaded=digests("loaded"), weights=digests("weights"))


def difference(own: Piece, expected: Piece) -> str | None:
    """Return the first thing that is not as in the undisturbed run, in words; None: all is."""
    if not own.lines:
        return "no iteration was trained"
    for iteration, digest in own.loaded.items():
        if digest != expected.states[iteration]:
            return f"optimizer state as loaded, of iteration {iteration}"
    for iteration, line in own.lines.items():
        other = expected.lines[iteration]
        for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if line[name] != other[name] or math.isnan(line[name]):  # no number, no training
                return f"{words} of iteration {iteration}: {line[name]!r}, not {other[name]!r}"
        if own.states.get(iteration) != expected.states[iteration]:
            return f"optimizer state after iteration {iteration}, whose loss is equal"
    if any(expected.weights.get(iteration, digest) != digest for iteration, digest in own.weights.items()):
        return "weights in the end, where the optimizer's state is equal"
    return None
