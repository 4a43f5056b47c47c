"""The demo's last word: a line of the held-out documentation, continued by the exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from relayrun.errors import InputError

WORDS = 10
NEW_TOKENS = 40


def first_words(folder: Path) -> str:
    """The beginning of a line of prose in the parquet files below `folder`. Raises InputError if there is none."""
    for path in sorted(folder.glob("*.parquet")):
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            for line in text.splitlines():
                words = line.split()
                if len(words) > WORDS + 1 and line[0].isupper() and all(word.isalpha() for word in words[:WORDS]):
                    return " ".join(words[:WORDS])
    raise InputError("no line of prose in these files", where=folder)


def continued(model_folder: Path, prompt: str) -> str:
    """What the model in a Hugging Face folder writes after `prompt`; drawn with a fixed seed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    set_seed(0)
    ids = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        pad_token_id=tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())
