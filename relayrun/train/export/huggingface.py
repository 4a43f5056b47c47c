"""A Hugging Face folder from a checkpoint: config, weights in safetensors, tokenizer, generation config.

Weights are read and written one file at a time: memory holds the tensors of one file and one piece of the
checkpoint, whatever the model's size and however it was split over ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from relayrun.errors import InputError
from relayrun.files import read_json, write_json
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.export import choose, hf_config
from relayrun.train.export.checkpoint_source import CheckpointSource
from relayrun.train.export.model_mapping import MappedTensor, ModelMapping
from relayrun.train.export.reader import CheckpointReader
from relayrun.train.model.size import pad_to_multiple

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_SIZE = 5_000_000_000
"""Bytes of one safetensors file, at most, as transformers has it; a single larger tensor has a file of its own."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class HuggingFaceExport:
    """The weights that an export made."""

    mapping: ModelMapping
    """What they were named by."""

    parameters: int
    bytes: int
    dtype: str
    files: int
    """Bytes of the weights in the folder."""


def write_huggingface(
    source: CheckpointSource, folder: Path, *, dtype: str, max_shard_size: int, mapping: str | None = None
) -> HuggingFaceExport:
    """Write everything into `folder`, which is there and gets its name later (`folder.new_folder`).

    `mapping`: import path of a mapping; None for that of the run's config, or the built-in one. Raises InputError if
    the checkpoint or the tokenizer is not the run's or no mapping fits, ConfigError if the path leads to none, and what
    `save_file` raises.
    """
    model, vocabulary = source.config.model, source.manifest.vocabulary_size
    chosen = choose.mapping_for_model(model, mapping)
    reader = CheckpointReader(source.folder, source.checksum)
    chosen.check(reader.shapes, model, pad_to_multiple(vocabulary, model.make_vocab_size_divisible_by), source.folder)
    of = reader.dtype if dtype == "auto" else DTYPES[dtype]
    name = next(name for name, value in DTYPES.items() if value is of)
    write_tokenizer(source, folder)
    bos, eos = _bos(folder), source.manifest.eod
    config = hf_config.to_huggingface_config(
        chosen, model, vocabulary=vocabulary, seq_length=source.config.training.seq_length, dtype=name, bos=bos, eos=eos
    )
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": bos, "eos_token_id": eos}
    write_json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None}
    )
    keys = chosen.keys(model, reader.shapes)
    pieces = [replace(piece, key=keys[piece.key]) for piece in chosen.pieces(model, vocabulary)]
    constants = {key: torch.tensor(value) for key, value in chosen.constants_of(model.num_layers).items()}
    files, parameters = _write_weights(reader, pieces, constants, folder, name, max_shard_size)
    return HuggingFaceExport(chosen, parameters, parameters * of.itemsize, name, files)


def _write_weights(
    reader: CheckpointReader,
    pieces: Sequence[MappedTensor],
    constants: Mapping[str, torch.Tensor],
    folder: Path,
    dtype_name: str,
    max_shard_size: int,
) -> tuple[int, int]:
    """Return the number of files, and of parameters. `constants` go into the last file."""
    dtype = DTYPES[dtype_name]
    files = _files(pieces, dtype.itemsize, max_shard_size)
    index: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {key: value for piece in part for key, value in read_mapped_tensor(reader, piece, dtype).items()}
        if number == len(files):
            tensors |= {key: value.to(dtype) for key, value in constants.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    parameters = sum(torch.Size(shape).numel() for piece in pieces for shape in piece.shapes.values())
    if len(files) > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": (parameters + len(constants)) * dtype.itemsize}, "weight_map": index},
        )
    return len(files), parameters


def read_mapped_tensor(reader: CheckpointReader, piece: MappedTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One piece of the model in Hugging Face's names."""
    outer, shape = len(piece.index), reader.shapes[piece.key]
    inner = shape[outer:] if piece.rows is None else (piece.rows, *shape[outer + 1 :])
    start = (*piece.index, *[0] * len(inner))
    tensor = reader.read(piece.key, start=start, shape=(*[1] * outer, *inner), dtype=dtype)
    parts = piece.split(tensor.reshape(inner))
    return {name: part.reshape(size) for (name, size), part in zip(piece.shapes.items(), parts, strict=True)}


def _files(pieces: Sequence[MappedTensor], itemsize: int, limit: int) -> list[list[MappedTensor]]:
    """Which pieces go into one file, in order."""
    files: list[list[MappedTensor]] = []
    room = 0
    for piece in pieces:
        size = sum(torch.Size(shape).numel() for shape in piece.shapes.values()) * itemsize
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(piece)
        room -= size
    return files


def write_tokenizer(source: CheckpointSource, folder: Path) -> None:
    """The run's tokenizer as files that transformers opens."""
    given, tokenizer = Path(source.config.data.tokenizer), source.tokenizer
    if given.is_dir():
        for name in TOKENIZER_FILES:
            if (given / name).is_file():
                shutil.copyfile(given / name, folder / name)
    elif given.is_file():
        shutil.copyfile(given, folder / "tokenizer.json")
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source.config.data.tokenizer).save_pretrained(folder)
    file = folder / "tokenizer.json"
    if file.exists() and (definition := read_json(file)).get("model", {}).get("dropout"):  # no text was trained with it
        definition["model"]["dropout"] = None
        write_json(file, definition)
    if not (folder / "tokenizer_config.json").exists():
        eod = source.manifest.eod
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": None if eod is None else tokenizer.tokenizer.id_to_token(eod),
        }
        write_json(folder / "tokenizer_config.json", settings)


def _bos(folder: Path) -> int | None:
    """The token that the exported tokenizer's configuration names for the begin of a text."""
    try:
        return load_tokenizer(TokenizeOptions(tokenizer=str(folder), append_eod="no", bos=True)).bos_id
    except InputError:  # it names none
        return None
