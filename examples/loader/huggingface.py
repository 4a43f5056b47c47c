"""A Hugging Face Trainer on a mixture, which resumes behind the samples that it trained on (docs/how-to/loader.md).

huggingface.py CONFIG FOLDER STEPS    # CONFIG: a YAML file with the settings of `data`
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from relayrun import checkpoints
from relayrun.client import should_leave, should_save, step_done
from relayrun.loader import Loader


class Relay(TrainerCallback):
    """Tells the chain of steps, hashes each checkpoint, and hears when to save and leave."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        leave = should_leave()
        control.should_save = control.should_save or leave or should_save()
        control.should_training_stop = control.should_training_stop or leave
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "loss" in logs:
            step_done(state.global_step, loss=logs["loss"], samples=seen)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoints.commit(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class SeenTrainer(Trainer):
    """Keeps a checksum of the batch, to compare runs."""

    def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
        global seen
        seen = zlib.crc32(inputs["input_ids"].numpy().tobytes())
        return super().training_step(model, inputs, *others, **named)


seen = 0
config, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(1)
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **small))
samples = Loader(config, seq_length=64, batch_size=8).for_trainer()
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=last,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=10,
    save_total_limit=3,
    ignore_data_skip=True,  # the loader goes on by its own state
    remove_unused_columns=False,  # shift_labels
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
    seed=1,
)
trainer = SeenTrainer(model, arguments, train_dataset=samples, callbacks=[samples, Relay()])
found = checkpoints.newest(folder)
trainer.train(resume_from_checkpoint=None if found is None else str(found.path))
samples.loader.close()
