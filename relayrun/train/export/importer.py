"""A torch_dist checkpoint from a folder of Hugging Face: weights only, iteration 0, loaded by every parallel layout.

Tensors are read and written one at a time. Beside the files of every checkpoint stands `model.yaml`, the
`model` section of a run config that fits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection
from relayrun.errors import InputError
from relayrun.files import read_json
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.export import choose, hf_config
from relayrun.train.export.contents import CheckpointContents
from relayrun.train.export.folder import new_folder
from relayrun.train.export.huggingface import DTYPES
from relayrun.train.export.model_mapping import MappedTensor
from relayrun.train.model.size import pad_to_multiple


@dataclass(frozen=True, kw_only=True)
class HuggingFaceImport:
    """The checkpoint that an import made, and what a run config must say of it."""

    model: ModelSection
    vocabulary: int
    """Rows of the embeddings that came from the folder; the padding after them is zero."""
    padded_vocabulary: int


class HuggingFaceWeights:
    """The tensors of a Hugging Face folder, one file or several with an index."""

    def __init__(self, folder: Path) -> None:
        """Open the weights in `folder`. Raises InputError if there are no safetensors, or a file is missing or torn."""
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                self._files: dict[str, str] = read_json(index)["weight_map"]
            else:
                with safe_open(folder / "model.safetensors", "pt") as file:
                    self._files = dict.fromkeys(file.keys(), "model.safetensors")
            self.shapes: dict[str, tuple[int, ...]] = {}
            for name in sorted(set(self._files.values())):
                with safe_open(folder / name, "pt") as file:
                    self.shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise InputError(
                f"has no weights in safetensors: {error}",
                where=folder,
                hint="give a folder that transformers' save_pretrained wrote",
            ) from None
        except (SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise InputError(f"its weights cannot be read: {error}", where=folder) from None

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises InputError if the file is torn."""
        try:
            with safe_open(self._folder / self._files[name], "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise InputError(f"{name} cannot be read: {error}", where=self._folder) from None


def import_huggingface(
    folder: Path, output: Path, *, dtype: str = "auto", divisible_by: int = 128, mapping: str | None = None
) -> HuggingFaceImport:
    """Write the checkpoint `output`, whole or not at all.

    `divisible_by` is the run's model.make_vocab_size_divisible_by; `mapping` the import path of a mapping, None for the
    built-in one of the folder's class. Raises InputError if `folder` holds no model that a run config can describe, or
    `output` cannot be written, and ConfigError if the path leads to no mapping.
    """
    config, where = read_huggingface_config(folder), folder / "config.json"
    chosen = choose.mapping_for_config(config, mapping, where=where)
    model = hf_config.from_huggingface_config(chosen, config, divisible_by, where=where)
    if mapping is not None:
        model = model.model_copy(update={"mapping": mapping})
    weights = HuggingFaceWeights(folder)
    rows, vocabulary = int(config["vocab_size"]), _tokenizer_size(folder)
    if vocabulary is not None and vocabulary > rows:
        raise InputError(f"its tokenizer has {vocabulary} entries, its embeddings {rows}", where=folder)
    wanted = {name: shape for piece in chosen.pieces(model, rows) for name, shape in piece.shapes.items()}
    constants = chosen.constants_of(model.num_layers)
    if missing := [name for name, shape in wanted.items() if weights.shapes.get(name) != shape]:
        raise InputError(
            f"{missing[0]} has the shape {weights.shapes.get(missing[0])}, not {wanted[missing[0]]} "
            "as config.json says",
            where=folder,
        )
    if extra := [name for name in weights.shapes.keys() - wanted.keys() - constants.keys() if name != "lm_head.weight"]:
        raise InputError(f"{min(extra)} is no weight of {chosen.with_article}", where=folder)
    for name in constants.keys() & weights.shapes:
        found, value = weights.read(name), torch.tensor(constants[name])
        if not torch.equal(found, value.to(found.dtype)):
            raise InputError(f"{name} is {float(found)}; only {float(value)} can be imported", where=folder)
    size = pad_to_multiple(vocabulary or rows, divisible_by)
    rows = min(rows, size)
    shapes = chosen.megatron_shapes(model, size)
    first = next(iter(wanted))
    of = weights.read(first).dtype if dtype == "auto" else DTYPES[dtype]
    with new_folder(output) as made:
        contents = CheckpointContents()
        for piece in chosen.pieces(model, rows):
            _add_piece(contents, piece, shapes[piece.key], of, weights)
        contents.add_extra_states(shapes)
        written = contents.write(made, {"iteration": 0})
        (made / "model.yaml").write_text(
            f"# the model of {folder.absolute()}\n" + yaml_file.dump_yaml({"model": model.model_dump(mode="json")})
        )
        written.add_checksums(0)
    return HuggingFaceImport(model=model, vocabulary=rows, padded_vocabulary=size)


def read_huggingface_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder. Raises InputError."""
    try:
        config = read_json(folder / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("this is no Hugging Face folder: it has no config.json", where=folder) from None
    except ValueError as error:
        raise InputError(f"is no JSON: {error}", where=folder / "config.json") from None
    if not isinstance(config, dict):
        raise InputError("is no JSON object", where=folder / "config.json")
    return config


def _tokenizer_size(folder: Path) -> int | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    return load_tokenizer(TokenizeOptions(tokenizer=str(folder), append_eod="no")).size


def _add_piece(
    contents: CheckpointContents,
    piece: MappedTensor,
    size: tuple[int, ...],
    dtype: torch.dtype,
    weights: HuggingFaceWeights,
) -> None:
    """`size`: of the whole tensor in the checkpoint."""
    outer = len(piece.index)
    part = (*[1] * outer, *size[outer:])
    start = (*piece.index, *[0] * (len(size) - outer))

    def make() -> torch.Tensor:
        tensor = piece.join([weights.read(name)[: shape[0]] for name, shape in piece.shapes.items()]).to(dtype)
        if piece.rows is not None and piece.rows < size[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(size[0] - piece.rows, *size[1:])])
        return tensor.reshape(part).contiguous()

    contents.add_tensor(piece.key, size=size, start=start, part=part, dtype=dtype, make=make)
