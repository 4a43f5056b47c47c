"""torchtitan's Trainer on a mixture, with relayrun's checkpoints around what it saves (docs/how-to/loader.md).

torchtitan_loader.py CONFIG FOLDER STEPS      # CONFIG: a YAML file with the settings of `data`
"""

import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from relayrun import checkpoints
from relayrun.client import should_leave, should_save, step_done
from relayrun.loader import Loader


class MixtureLoader(BaseDataLoader):
    """The loader of relayrun as torchtitan asks for it; its state loads on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path`: the file with the settings of `data`."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.loader = Loader(
            config.dataset_path or "",
            seq_length=seq_len,
            batch_size=local_batch_size * dp_world_size,
            rank=dp_rank,
            world_size=dp_world_size,
        )
        self.samples = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader.as_torch():
            ids, labels = batch["input_ids"], batch["labels"]
            if "loss_mask" in batch:
                labels = labels.masked_fill(batch["loss_mask"] == 0, IGNORE_INDEX)
            positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
            self.samples = zlib.crc32(ids.numpy().tobytes())
            yield {"input": ids, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"samples": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(json.loads(state["samples"]))


class Checkpoints(CheckpointManager):
    """relayrun's checkpoints, which hash what torchtitan saves."""

    leaves = False

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As torchtitan's."""

    def save(self, step: int, last_step: bool = False) -> bool:
        """Look behind each step whether to save and to leave."""
        self.leaves = should_leave()
        if not (self.leaves or should_save() or step % 10 == 0 or last_step):
            return False
        with checkpoints.saving(folder, step, keep_last=3) as path:
            self.folder = str(path)
            return super().save(step, last_step=True)  # at once


class Relay(Trainer):
    """Tells the chain of steps, and leaves when it is asked to."""

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        self.loss = super().forward_backward_step(**batch)
        return self.loss

    def train_step(self, batches: Any) -> None:
        super().train_step(batches)
        step_done(self.step, loss=self.loss.item(), samples=self.dataloader.samples)

    def should_continue_training(self) -> bool:
        return not self.checkpointer.leaves and super().should_continue_training()


init_logger()
file, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = llama3_debugmodel()
config.dataloader = MixtureLoader.Config(dataset_path=file)
tokenizer = Path(yaml.safe_load(Path(file).read_text())["data"]["tokenizer"])
config.hf_assets_path = str(tokenizer if tokenizer.is_dir() else tokenizer.parent)
config.dump_folder = folder
config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 8, last
config.training.disable_cuda_graphs = True
config.validator.enable = False
config.debug.seed = 1
config.checkpoint = Checkpoints.Config(enable=True, last_save_model_only=False)
trainer = Relay(config)
if (found := checkpoints.newest(folder)) is not None:
    trainer.checkpointer.folder = str(found.path)
try:
    trainer.train()
finally:
    trainer.close()
    trainer.dataloader.loader.close()
torch.distributed.destroy_process_group()
