"""The part `recovery`: ranks that die twice and go on inside their job, against a run where none does, to the last bit.

| run | what happens |
|---|---|
| whole | nothing; `chain.recovery` is `job` |
| rounds | two deaths; `chain.recovery` is `node`, and each iteration is copied to memory |

The last rank is ended by SIGKILL behind an iteration between two saves. In the next round it is the first rank, at a
later iteration, between its gradients and its update.

Both with `training.deterministic`, and at the same time. A round that begins at all has found the GPU's memory free.
"""

from __future__ import annotations

from typing import Any

from relayrun.control.rundir import rounds
from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.pieces import AttemptValues, first_difference, undisturbed_values
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures

NODE_RECOVERY: dict[str, dict[str, Any]] = {"chain": {"recovery": "node"}, "checkpoint": {"memory_interval": 1}}


def measure_recovery(setup: CheckSetup, figures: PartFigures) -> None:
    """Run both, and compare. Raises CheckFailed where a run did not come to its end, or left nothing to compare."""
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
    """Return the cuts of each round, for the hook `Cut`."""
    interval = setup.sizes.interval
    between, later = interval + interval // 2, 2 * interval + interval // 2
    return [
        {"signal": "SIGKILL", "iteration": between, "rank": ranks - 1},
        {"signal": "SIGKILL", "iteration": later, "rank": 0, "before_update": True},
    ]


def recorded_attempts(run: Run) -> dict[str, Any]:
    """Return what the records say of the run's attempts and failed rounds, oldest first; no name of a machine."""
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
            for failed in rounds.read_failed_restarts(run.attempt(number))
        ],
    }


def compare_recovered_run(run: Run, expected: AttemptValues) -> dict[str, Any]:
    """Hold all attempts of a run against the undisturbed one. Raises CheckFailed where it left no digests."""
    pieces = {number: AttemptValues.of(run, number) for number in run.attempt_numbers()}
    for number, piece in pieces.items():
        for failed in rounds.read_failed_restarts(run.attempt(number)):
            if failed.again and failed.next_iteration and failed.next_iteration not in piece.loaded:
                raise CheckFailed(f"the round behind round {failed.round} left no digest of what it loaded")
    trained = {iteration for piece in pieces.values() for iteration in piece.lines}
    if trained != expected.lines.keys() or not any(piece.weights for piece in pieces.values()):
        raise CheckFailed(f"{run.path.name} left no record of every iteration, or no digest of its weights")
    found = [different for piece in pieces.values() if (different := first_difference(piece, expected)) is not None]
    return {"iterations": len(trained), "equal": not found, "difference": found[0] if found else None}
