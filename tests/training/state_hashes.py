"""A hook of test_training_skips.py: hashes of all state of a rank between iterations, and an update that it skips."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from relayrun.train.distributed import capture_random_state
from relayrun.train.hooks import Action, Gradients, Hook, HookContext, StepStart, UpdateVerdict


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode() + bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return found.hexdigest()


class RecordsState(Hook):
    """Writes the hashes before every iteration to `hashes-RANK.jsonl`; skips the iterations `skipped`."""

    may_differ = False

    def __init__(self, skipped: list[int]) -> None:
        self.skipped = skipped

    def setup(self, context: HookContext) -> None:
        self.context = context

    def before_step(self, start: StepStart) -> None:
        model, optimizer = self.context.model, self.context.optimizer
        line: dict[str, Any] = {"iteration": start.iteration, "consumed_samples": start.consumed_samples}
        for kind in ("parameters", "buffers"):
            line[kind] = digest(each for chunk in model.chunks for each in getattr(chunk, f"named_{kind}")())
        own = [inner.optimizer for inner in optimizer.inner.chained_optimizers]
        weights = [one for each in own for group in each.param_groups for one in group["params"]]
        line["main weights"] = digest(("", one) for one in weights)
        line["optimizer"] = digest(
            (name, value)
            for each in own
            for one in weights
            for name, value in sorted(each.state.get(one, {}).items())
            if isinstance(value, torch.Tensor)
        )
        line["random"] = hashlib.sha256(pickle.dumps(capture_random_state()["torch"].numpy().tobytes())).hexdigest()
        with (self.context.run_dir / f"hashes-{self.context.ranks.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def before_update(self, gradients: Gradients) -> UpdateVerdict:
        if gradients.iteration in self.skipped:
            return UpdateVerdict(Action.SKIP, "the hook says so")
        return UpdateVerdict(Action.UPDATE)
