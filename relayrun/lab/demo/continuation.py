"""The demo's last word: the beginning of a held-out story, continued by the model before and after its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from relayrun.errors import InputError

PROMPT_WORDS = 12
NEW_TOKENS = 60


def first_heldout_words(folder: Path, *, words: int) -> str:
    """The first words of the first text in the parquet files below `folder`. Raises InputError if there is none."""
    for path in sorted(folder.glob("*.parquet")):
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            return " ".join(text.split()[:words])
    raise InputError("no text in these files", where=folder)


def continue_before_and_after(model_folder: Path, prompt: str) -> tuple[str, str]:
    """Continue `prompt` with random weights and with those of a Hugging Face folder; one seed draws both texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    trained: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    set_seed(0)
    untrained: Any = type(trained)(trained.config)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    found = []
    for model in (untrained, trained):
        set_seed(0)
        ids = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=0.7,
            top_k=20,
            pad_token_id=tokenizer.eos_token_id,
        )
        text = tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append(" ".join(text.split()))
    return found[0], found[1]
