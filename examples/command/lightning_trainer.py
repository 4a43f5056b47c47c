"""A Lightning Trainer that is asked to save and leave by a callback, and goes on exactly (docs/command.md).

The model is a tiny one, the data are made up: nothing is downloaded.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from relayrun.client import checkpoint, checkpoint_done, should_leave, should_save, step_done


class Relay(Callback):
    """Tells the chain of steps and checkpoints, and hears from it; all ranks do what one of them hears."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        step_done(step, loss=float(outputs["loss"]))
        save = trainer.strategy.reduce_boolean_decision(should_save(), all=False)
        leave = trainer.strategy.reduce_boolean_decision(should_leave(), all=False)
        if save or leave or step % self.every == 0 or step == trainer.max_steps:
            path = self.folder / f"step-{step}.ckpt"
            trainer.save_checkpoint(path)  # which waits for all ranks
            checkpoint_done(step, path)
        trainer.should_stop = trainer.should_stop or leave


class Batches:
    """Made-up batches; its state lets the Trainer go on inside an epoch, which it does with no other loader."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.sin(torch.arange(64.0) * self.at).view(8, 8)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32),
            torch.nn.Dropout(0.1),  # so that the state of the random numbers matters
            torch.nn.GELU(),
            torch.nn.Linear(32, 8),
        )

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()  # Lightning saves none

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.random = checkpoint["random"]

    def on_train_start(self) -> None:
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


folder, last = Path(sys.argv[1]), int(sys.argv[2])
seed_everything(1)
trainer = Trainer(
    max_steps=last,
    accelerator="auto",
    callbacks=[Relay(folder, every=50)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    default_root_dir=folder,
)
trainer.fit(Model(), Batches(1000), ckpt_path=checkpoint())
