"""A torchtitan Trainer that the chain asks to save and to leave, with any of its configs (docs/how-to/command.md).

    python torchtitan_trainer.py --module=llama3 --config=llama3_8b --dump_folder=...

`--module=torchtitan_trainer --config=tiny` is a tiny model on made-up text: nothing is downloaded.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from relayrun.client import should_leave, should_save


class Relay(Trainer):
    """Hears from the chain before each step; all ranks do what rank 0 hears."""

    def should_continue_training(self) -> bool:
        wish = torch.tensor([should_save(), should_leave()], dtype=torch.int32, device=self.device)
        torch.distributed.broadcast(wish, src=0)
        save, leave = wish.tolist()
        last = self.step == self.config.training.steps
        if (save or leave) and not last and self.step % self.config.checkpoint.interval:
            self.checkpointer.save(self.step, last_step=True)  # which saves at once, as at the last step
        self.checkpointer.maybe_wait_for_saving()
        return not leave and super().should_continue_training()


def tiny() -> Trainer.Config:
    """A config as in torchtitan's own config_registry.py."""
    config = llama3_debugmodel()
    config.hf_assets_path = str(byte_tokenizer(Path(tempfile.mkdtemp())))
    config.dataloader.dataset = "made-up"
    config.training.seq_len, config.training.local_batch_size = 64, 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.debug.seed = 1
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.keep_latest_k = True, 50, 0
    return config


def made_up(path: str) -> Dataset:
    """Texts for torchtitan's table of data sets."""
    words = ["one job runs", "the next waits behind it", "the checkpoint is the baton"]
    return Dataset.from_dict({"text": [f"{words[i % 3]}, {i}, {words[i % 2]}" for i in range(1000)]})


DATASETS["made-up"] = DatasetConfig(path="", loader=made_up, sample_processor=lambda sample: sample["text"])


def byte_tokenizer(folder: Path) -> Path:
    """Make the files of a tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # else each process had ids of its own
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


if __name__ == "__main__":
    init_logger()
    config = ConfigManager().parse_args(sys.argv[1:])
    config.checkpoint.last_save_model_only = False  # the run goes on from what it saves when it is asked
    trainer = Relay(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()
