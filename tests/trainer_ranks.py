"""`trainer_ranks.py DATA_JSON FOLDER STEPS`: a Trainer on several ranks, each of which writes what it trained on."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from relayrun.loader import Loader


class SeenTrainer(Trainer):
    """Keeps the rows of each step."""

    def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
        seen.append(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, *others, **named)


data, folder, steps = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3])
seen: list[Any] = []
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
samples = Loader(data, seq_length=64, batch_size=12).for_trainer()
arguments = TrainingArguments(
    output_dir=str(folder),
    max_steps=steps,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    save_steps=2,
    ignore_data_skip=True,
    remove_unused_columns=False,
    use_cpu=True,
    disable_tqdm=True,
    report_to="none",
)
torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **small))
trainer = SeenTrainer(model, arguments, train_dataset=samples, callbacks=[samples])
saved = sorted(folder.glob("checkpoint-*"))
trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)
(folder / f"rank-{arguments.process_index}-{steps}.json").write_text(json.dumps(seen))
samples.loader.close()
