"""Hooks as a user writes them, in a module of the user's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from relayrun.control.rundir.records import AttemptOutcome, CheckpointCommit
from relayrun.train.hooks import Action, Gradients, Hook, HookContext, Step, StepStart, UpdateVerdict, ValidationResult


class CountSteps(Hook):
    """Counts over all attempts of a run; the state is in the checkpoint, and on rank 0 in a file at the end."""

    def __init__(self, file: str = "counted.jsonl") -> None:
        self.file = file
        self.steps = 0
        self.losses = torch.zeros(0, dtype=torch.float64)

    def setup(self, context: HookContext) -> None:
        self.context = context

    def after_step(self, step: Step) -> None:
        self.steps += 1
        self.losses = torch.cat([self.losses, torch.tensor([step.loss], dtype=torch.float64)])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.losses = state["steps"], state["losses"]

    def at_end(self, outcome: AttemptOutcome) -> None:
        counts = self.context.ranks.gather(self.steps)
        if self.context.ranks.rank == 0:
            line = {"attempt": self.context.attempt, "iteration": outcome.iteration, "counts": counts}
            with (self.context.run_dir / self.file).open("a") as file:
                file.write(json.dumps(line | {"losses": self.losses.tolist()}) + "\n")


class Diary(Hook):
    """Writes down when it is called, a file per rank."""

    def setup(self, context: HookContext) -> None:
        self.context = context
        self.path = context.run_dir / f"diary-{context.attempt}-{context.ranks.rank}"
        self._note("setup")

    def _note(self, *words: object) -> None:
        with self.path.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def state_dict(self) -> dict[str, Any]:
        self._note("state_dict")
        return {"rank": self.context.ranks.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._note("load_state_dict", state)

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        self._note("at_start", iteration, consumed_samples)

    def before_step(self, start: StepStart) -> None:
        self._note("before_step", start.iteration, start.consumed_samples, start.global_batch_size)

    def before_update(self, gradients: Gradients) -> None:
        largest = max(
            parameter.main_grad.abs().max().item()  # type: ignore[union-attr, operator]
            for chunk in self.context.model.chunks
            for parameter in chunk.parameters()
        )
        assert 0 < largest <= gradients.grad_norm
        self._note("before_update", gradients.iteration)

    def after_step(self, step: Step) -> None:
        self._note("after_step", step.iteration, step.consumed_samples)

    def before_publish(self, iteration: int, folder: Path) -> None:
        assert (folder / "metadata.json").exists()
        self._note("before_publish", iteration)

    def after_save(self, commit: CheckpointCommit) -> None:
        assert Path(commit.path).is_dir()
        self._note("after_save", commit.iteration)

    def at_evaluation(self, result: ValidationResult) -> None:
        self._note("at_evaluation", result.iteration, *result.losses)

    def at_end(self, outcome: AttemptOutcome) -> None:
        assert not (self.context.run_dir / "attempts" / f"{self.context.attempt:04}" / "outcome.json").exists()
        self._note("at_end", outcome.outcome)

    def close(self) -> None:
        self._note("close")


class Objector(Hook):
    """Leaves out the update of one iteration, decided on rank 1 alone."""

    def __init__(self, iteration: int, action: str = "skip") -> None:
        self.iteration = iteration
        self.action = Action[action.upper()]

    def setup(self, context: HookContext) -> None:
        self.rank = context.ranks.rank

    def before_update(self, gradients: Gradients) -> UpdateVerdict | None:
        if self.rank == 1 and gradients.iteration >= self.iteration:
            return UpdateVerdict(self.action, "I do not like it")
        return None


class Raises(Hook):
    """Has an error in one method, on one rank or (-1) on all."""

    def __init__(self, method: str, rank: int = -1, iteration: int = 4) -> None:
        self.method, self.rank, self.iteration = method, rank, iteration

    def setup(self, context: HookContext) -> None:
        self.own = context.ranks.rank

    def _raise(self, method: str) -> None:
        if method == self.method and self.rank in (-1, self.own):
            raise ZeroDivisionError("of my own")

    def after_step(self, step: Step) -> None:
        if step.iteration == self.iteration:
            self._raise("after_step")

    def before_publish(self, iteration: int, folder: Path) -> None:
        if iteration == self.iteration:
            self._raise("before_publish")


class Breaks(Hook):
    """Has an error after the last iteration that its options name for this attempt."""

    def __init__(self, after: dict[str, int]) -> None:
        self.after = after

    def setup(self, context: HookContext) -> None:
        self.iteration = self.after.get(str(context.attempt))

    def after_step(self, step: Step) -> None:
        if step.iteration == self.iteration:
            raise RuntimeError("broken by a test")


class Leaves(Hook):
    """Ends the process where a hook must not."""

    def after_step(self, step: Step) -> None:
        raise SystemExit(0)


class NotPlain(Hook):
    def state_dict(self) -> dict[str, Any]:
        return {"paths": [Path("x")]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OneWay(Hook):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": 1}


class NoHook:
    pass


class Witness(Hook):
    """Says what `training.deterministic` has come to on its rank."""

    def setup(self, context: HookContext) -> None:
        on, config = torch.are_deterministic_algorithms_enabled(), context.model.chunks[0].config
        algorithm = f"NCCL_ALGO={os.environ.get('NCCL_ALGO')}"
        print(f"deterministic: torch {on}, megatron-core {config.deterministic_mode}, {algorithm}", flush=True)


class FlipsBits(Hook):
    """Damages the first checkpoints of these iterations behind their save, one time each."""

    def __init__(self, iterations: list[int]) -> None:
        self.left = list(iterations)

    def setup(self, context: HookContext) -> None:
        self.context = context

    def after_save(self, commit: CheckpointCommit) -> None:
        if commit.iteration in self.left:
            self.left.remove(commit.iteration)
            if self.context.ranks.rank == 0:
                path = Path(commit.path) / "__1_0.distcp"
                data = bytearray(path.read_bytes())
                data[120_000] ^= 1
                path.write_bytes(data)
