"""An exported folder, opened as transformers and lm-evaluation-harness open it, before the export is done.

The model is made on torch's device `meta`: names and shapes are compared, no weight is read into memory. Code that lies
in the folder is not run.
"""

from __future__ import annotations

import contextlib
import io
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relayrun.errors import InputError
from relayrun.files import read_json
from relayrun.train.export.source_and_target import CheckpointSource

_IDS_COMPARED = 64


def check_opens(source: CheckpointSource, folder: Path) -> list[str]:
    """Open an export; return what its user will notice, one line each. Raises InputError if transformers does not open
    it, or lm_eval, where it is installed, does not."""
    if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
        return [f"not opened: {missing[0]} is not installed here"]
    name = "config.json"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # warnings of libraries for their callers
            model = load_model(folder, device_map="meta", dtype="auto", trust_remote_code=False)
            name = "tokenizer_config.json"
            return _check_tokenizer(source, folder, model)
    except InputError:
        raise
    except Exception as error:  # each version of the libraries has others
        if "auto_map" in read_json(folder / name):
            return [f"not opened: {name} names code of its own (auto_map), which is not run here"]
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        hint = f"see {name}, and whether a newer transformers has the class"
        raise InputError(f"cannot be opened: {type(error).__name__}: {said}", where=folder, hint=hint) from None


def _check_tokenizer(source: CheckpointSource, folder: Path, model: Any) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    own, rows = source.tokenizer.tokenizer, model.config.vocab_size
    text = own.decode(list(range(min(_IDS_COMPARED, rows))))
    notes, opens = [], f"transformers opens the tokenizer as {type(tokenizer).__name__}, "
    if tokenizer.encode(text, add_special_tokens=False) != own.encode(text, add_special_tokens=False).ids:
        notes.append(f"{opens}which gives other ids than the run's tokenizer")
    if len(tokenizer) > rows:
        notes.append(f"{opens}with {len(tokenizer)} entries for {rows} rows of embeddings")
    if find_spec("lm_eval") is not None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        from lm_eval.models.huggingface import HFLM

        if HFLM(pretrained=model, tokenizer=tokenizer).prefix_token_id is None:
            notes.append("lm_eval finds no token that begins or ends a text: some of its tasks need one")
    return notes


def load_model(folder: Path, **options: Any) -> Any:
    """Load the model of a folder. Raises InputError unless its weights are those of the class."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # among others, that it computes xIELU without a kernel; a missing weight is an error below
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, found[f"{what}_keys"])):
            raise InputError(
                f"the class {type(model).__name__} of transformers has other weights: {names[0]} is {what}",
                where=folder,
                hint="give each weight the name that the class has, in the mapping",
            )
    return model
