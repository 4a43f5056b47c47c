"""A checkpoint of Megatron-LM as the source of an export: its arguments and a tokenizer stand for a run's records."""

from __future__ import annotations

from pathlib import Path

from relayrun.config.compose.schema import RunConfig
from relayrun.errors import InputError
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.export import megatron_settings
from relayrun.train.export.checkpoint_source import CheckpointSource
from relayrun.train.model.size import pad_to_multiple


def megatron_source(checkpoint: MegatronCheckpoint, tokenizer: str | None) -> CheckpointSource:
    """Return the source; `tokenizer`: None for the one that the arguments name, where it can be opened.

    Raises InputError if there is no tokenizer, it has more entries than the embeddings, or it is no such model.
    """
    name = tokenizer or _of_the_arguments(checkpoint)
    found = load_tokenizer(TokenizeOptions(tokenizer=name, append_eod="auto"))
    sections = megatron_settings.run_sections(checkpoint)
    model, rows = sections["model"], checkpoint.args.get("padded_vocab_size")
    if isinstance(rows, int) and pad_to_multiple(found.size, model["make_vocab_size_divisible_by"]) != rows:
        if found.size > rows:
            raise InputError(
                f"the tokenizer {name} has {found.size} entries, the embeddings {rows}",
                where=checkpoint.folder,
                hint="give the tokenizer that the model was trained with",
            )
        model["make_vocab_size_divisible_by"] = rows
    config = RunConfig.model_validate(
        sections
        | {
            "project": "megatron-lm",
            "name": "checkpoint",
            "data": {"tokenizer": name, "datasets": [str(checkpoint.folder)]},
            "checkpoint": {"interval": 1},
            "job": {"time": "1"},
            "cluster": {"name": "none", "scheduler": "local"},
        }
    )
    manifest = Manifest(
        datasets={},
        validation={},
        vocabulary_size=found.size,
        eod=found.eos_id,
        tokenizer=name,
        tokenizer_fingerprint=found.fingerprint,
    )
    return CheckpointSource(
        run=None, iteration=checkpoint.iteration, folder=checkpoint.folder, config=config, manifest=manifest
    )


def _of_the_arguments(checkpoint: MegatronCheckpoint) -> str:
    kind, name = checkpoint.args.get("tokenizer_type"), checkpoint.args.get("tokenizer_model")
    if kind == "HuggingFaceTokenizer" and isinstance(name, str) and Path(name).exists():
        return name
    raise InputError(
        f"its tokenizer ({kind}, {name}) cannot be opened here",
        where=checkpoint.folder,
        hint="give --tokenizer: a folder or file of Hugging Face, or a name on its hub",
    )
