"""A Hugging Face Trainer that is asked to save and leave by a callback, and goes on exactly (docs/how-to/command.md).

The model is a tiny one from a config, the text is made up: nothing is downloaded.
"""

import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from relayrun.client import checkpoint, checkpoint_done, should_leave, should_save, step_done


class Relay(TrainerCallback):
    """Tells the chain of steps and checkpoints, and hears from it; with several ranks, all do what rank 0 hears."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        wish = torch.tensor([should_save(), should_leave()], dtype=torch.int32, device=args.device)
        if args.world_size > 1:
            torch.distributed.broadcast(wish, src=0)
        save, leave = wish.tolist()
        control.should_save = control.should_save or bool(save or leave)
        control.should_training_stop = control.should_training_stop or bool(leave)
        if not control.should_log:
            step_done(state.global_step)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        step_done(state.global_step, **{name: value for name, value in logs.items() if isinstance(value, float)})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:  # rank 0 does not wait for what the others write into the folder
            torch.distributed.barrier()
        checkpoint_done(state.global_step, os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))


class Lines(torch.utils.data.Dataset):
    """Made-up lines of 16 tokens, each of which follows from its number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(16) * (number % 7 + 1) % 61
        return {"input_ids": ids, "labels": ids}


folder, last = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,  # so that the state of the random numbers matters
    )
)
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=last,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=50,
    save_total_limit=3,
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
    seed=1,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), callbacks=[Relay()])
trainer.train(resume_from_checkpoint=checkpoint())
if trainer.state.global_step >= last:  # train() also comes back where it was asked to leave
    trainer.save_model(os.path.join(folder, "model"))
