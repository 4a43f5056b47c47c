"""A Lightning module on a mixture, which resumes behind the samples that it trained on (docs/how-to/loader.md).

lightning_module.py CONFIG FOLDER STEPS      # CONFIG: a YAML file with the settings of `data`
"""

import sys
import zlib
from typing import Any

import lightning
import torch

from relayrun import checkpoints
from relayrun.client import should_leave, should_save, step_done
from relayrun.loader import Loader

config, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Module(lightning.LightningModule):
    """A model and its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(512, 32), torch.nn.Linear(32, 512))
        self.loader = Loader(config, seq_length=64, batch_size=8)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.loader.as_torch(), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning fetches a batch ahead: the state is that of the steps."""
        checkpoint["samples"] = self.loader.state_dict(self.global_step * self.loader.batch_size)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loader.load_state_dict(checkpoint["samples"])


class Relay(lightning.Callback):
    """Tells the chain of steps, saves, and hears when to leave."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        step, leave = trainer.global_step, should_leave()
        step_done(step, loss=outputs["loss"].item(), samples=zlib.crc32(batch["input_ids"].numpy().tobytes()))
        if leave or should_save() or step % 10 == 0 or step == last:
            with checkpoints.saving(folder, step, keep_last=3) as path:
                trainer.save_checkpoint(path / "module.ckpt", weights_only=False)
        trainer.should_stop = trainer.should_stop or leave


torch.manual_seed(1)
module = Module()
trainer = lightning.Trainer(
    max_steps=last,
    max_epochs=1,
    accelerator="cpu",
    callbacks=[Relay()],
    logger=False,
    enable_checkpointing=False,  # relayrun's, which hash what they hold
    enable_progress_bar=False,
    enable_model_summary=False,
)
found = checkpoints.newest(folder)
trainer.fit(module, ckpt_path=None if found is None else found.path / "module.ckpt")
module.loader.close()
