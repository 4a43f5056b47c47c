"""A Hugging Face folder from a checkpoint: config, weights in safetensors, tokenizer, generation config.

Weights are read and written one file at a time: memory holds the tensors of one file and one piece of the
checkpoint, whatever the model's size and however it was split over ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from relayrun.errors import InputError
from relayrun.export import llama
from relayrun.export.checkpoint_source import CheckpointSource
from relayrun.export.llama import Piece
from relayrun.export.reader import CheckpointReader
from relayrun.files import write_json
from relayrun.tokenization.encode.tokenizer import load_tokenizer
from relayrun.tokenization.options import TokenizeOptions
from relayrun.training.model.size import padded

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
class Exported:
    """The weights that an export made."""

    parameters: int
    bytes: int
    dtype: str
    files: int
    """Bytes of the weights in the folder."""


def write(source: CheckpointSource, folder: Path, *, dtype: str, max_shard_size: int) -> Exported:
    """Write everything into `folder`, which is there and gets its name later (`folder.new_folder`).

    Raises InputError if the checkpoint or the tokenizer is not the run's, and what `save_file` raises.
    """
    model, vocabulary = source.config.model, source.manifest.vocabulary_size
    reader = CheckpointReader(source.folder, source.checksum)
    llama.check(reader.shapes, model, padded(vocabulary, model.make_vocab_size_divisible_by), source.folder)
    of = reader.dtype if dtype == "auto" else DTYPES[dtype]
    name = next(name for name, value in DTYPES.items() if value is of)
    write_tokenizer(source, folder)
    bos, eos = _bos(folder), source.manifest.eod
    config = llama.to_config(
        model, vocabulary=vocabulary, seq_length=source.config.training.seq_length, dtype=name, bos=bos, eos=eos
    )
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": bos, "eos_token_id": eos}
    write_json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None}
    )
    return _write_weights(reader, list(llama.pieces(model, vocabulary)), folder, name, max_shard_size)


def _write_weights(
    reader: CheckpointReader, pieces: Sequence[Piece], folder: Path, dtype_name: str, max_shard_size: int
) -> Exported:
    dtype = DTYPES[dtype_name]
    files = _files(pieces, dtype.itemsize, max_shard_size)
    index: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {key: value for piece in part for key, value in read_piece(reader, piece, dtype).items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    parameters = sum(torch.Size(shape).numel() for piece in pieces for shape in piece.shapes.values())
    if len(files) > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": parameters * dtype.itemsize}, "weight_map": index},
        )
    return Exported(parameters, parameters * dtype.itemsize, dtype_name, len(files))


def read_piece(reader: CheckpointReader, piece: Piece, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One piece of the model in Hugging Face's names."""
    shape = reader.shapes[piece.key]
    start = [0] * len(shape)
    if piece.layer is not None:
        start[0], shape = piece.layer, (1, *shape[1:])
    elif piece.rows is not None:
        shape = (piece.rows, *shape[1:])
    tensor = reader.read(piece.key, start=start, shape=shape, dtype=dtype)
    parts = piece.split(tensor if piece.layer is None else tensor[0])
    return dict(zip(piece.shapes, parts, strict=True))


def _files(pieces: Sequence[Piece], itemsize: int, limit: int) -> list[list[Piece]]:
    """Which pieces go into one file, in order."""
    files: list[list[Piece]] = []
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
