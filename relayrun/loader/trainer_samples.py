"""`relayrun.loader` in Hugging Face's `Trainer`: samples, and a callback that keeps their state in each checkpoint.

samples = Loader(data, seq_length=4096, batch_size=64).for_trainer()
arguments = TrainingArguments(..., max_steps=1000, ignore_data_skip=True, remove_unused_columns=False)
Trainer(model, arguments, train_dataset=samples, callbacks=[samples]).train(resume_from_checkpoint=...)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from relayrun.errors import ConfigError
from relayrun.loader import Loader
from relayrun.loader.torch_batches import as_tensors, refuse_several_workers


class TrainerSamples(torch.utils.data.IterableDataset[dict[str, torch.Tensor]], TrainerCallback, ExportableState):  # type: ignore[misc]
    """Samples of a loader: `input_ids`, and as `labels` and `shift_labels` the next tokens, -100 where a mask is 0.

    As a callback it keeps the state of those trained on, not of those fetched ahead, in `trainer_state.json`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._trainer, self._start = TrainerState(), 0  # the Trainer asks for the state before it trains

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Go on where the loader stands. Raises InputError in one of several workers, which would repeat samples."""
        refuse_several_workers()
        for batch in map(as_tensors, self.loader):
            labels = batch["labels"]
            if "loss_mask" in batch:
                labels = labels.masked_fill(batch["loss_mask"] == 0, -100)
            parts = {"input_ids": batch["input_ids"], "labels": labels, "shift_labels": labels}
            parts |= {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
            for row in range(len(labels)):
                yield {name: part[row] for name, part in parts.items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the state of the checkpoint. Raises ConfigError for arguments with which the samples would be others."""
        size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if size != self.loader.batch_size or self.loader.world_size != 1:
            words = f"a step of the Trainer takes {size} samples, not the loader's {self.loader.batch_size}"
            raise ConfigError(words, hint=f"Loader(..., batch_size={size}, world_size=1)")
        if not args.ignore_data_skip or args.remove_unused_columns:
            hint = "TrainingArguments(..., ignore_data_skip=True, remove_unused_columns=False)"
            raise ConfigError("the Trainer would skip samples, or leave out shift_labels", hint=hint)
        if state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if not isinstance(saved, dict):
                raise ConfigError("the checkpoint has no state of the loader: it was saved without this callback")
            self.loader.load_state_dict(saved["attributes"]["samples"])
        self._trainer, self._start = state, self.loader.position - state.global_step * size

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        position = self._start + self._trainer.global_step * self.loader.batch_size
        return {"args": {}, "attributes": {"samples": self.loader.state_dict(position)}}
