"""A torch_dist checkpoint from a Hugging Face Llama: weights only, iteration 0, loaded by every parallel layout.

Tensors are read and written one at a time. Beside the files of every checkpoint stands `model.yaml`, the
`model` section of a run config that fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from relayrun.config import yamlfile
from relayrun.config.schema import Model
from relayrun.errors import InputError
from relayrun.export import llama
from relayrun.export.contents import Contents
from relayrun.export.folder import new_folder
from relayrun.export.huggingface import DTYPES
from relayrun.export.llama import Piece
from relayrun.files import read_json
from relayrun.tokenization.encode.tokenizer import load_tokenizer
from relayrun.tokenization.options import TokenizeOptions
from relayrun.training.model.size import padded

EMBEDDINGS = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The checkpoint that an import made, and what a run config must say of it."""

    model: Model
    vocabulary: int
    """Rows of the embeddings that came from the folder; the padding after them is zero."""
    padded_vocabulary: int


class Weights:
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


def import_hf(folder: Path, output: Path, *, dtype: str = "auto", divisible_by: int = 128) -> Imported:
    """Write the checkpoint `output`, whole or not at all.

    `divisible_by` is the run's model.make_vocab_size_divisible_by. Raises InputError if `folder` holds no
    Llama that a run config can describe, or `output` cannot be written.
    """
    config = read_config(folder)
    model = from_config(config, divisible_by, where=folder / "config.json")
    weights = Weights(folder)
    rows, vocabulary = int(config["vocab_size"]), _tokenizer_size(folder)
    if vocabulary is not None and vocabulary > rows:
        raise InputError(f"its tokenizer has {vocabulary} entries, its embeddings {rows}", where=folder)
    wanted = {name: shape for piece in llama.pieces(model, rows) for name, shape in piece.shapes.items()}
    if missing := [name for name, shape in wanted.items() if weights.shapes.get(name) != shape]:
        raise InputError(
            f"{missing[0]} has the shape {weights.shapes.get(missing[0])}, not {wanted[missing[0]]} "
            "as config.json says",
            where=folder,
        )
    if extra := [name for name in weights.shapes.keys() - wanted.keys() if name != "lm_head.weight"]:
        raise InputError(f"{min(extra)} is no weight of a Llama", where=folder)
    size = padded(vocabulary or rows, divisible_by)
    rows = min(rows, size)
    of = weights.read(EMBEDDINGS).dtype if dtype == "auto" else DTYPES[dtype]
    with new_folder(output) as made:
        contents = Contents()
        for piece in llama.pieces(model, rows):
            _add_piece(contents, piece, llama.megatron_shapes(model, size)[piece.key], of, weights)
        contents.add_extra_states(model.num_layers)
        written = contents.write(made, {"iteration": 0})
        (made / "model.yaml").write_text(
            f"# the model of {folder.absolute()}\n" + yamlfile.dump({"model": model.model_dump(mode="json")})
        )
        written.add_checksums(0)
    return Imported(model=model, vocabulary=rows, padded_vocabulary=size)


def read_config(folder: Path) -> dict[str, Any]:
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


def from_config(config: Mapping[str, Any], divisible_by: int, *, where: object) -> Model:
    """Return the model section of a config.json, of transformers 4 or 5.

    Raises InputError if this is not that Llama.
    """
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise InputError(
            f"does not describe a Llama: hidden_size {hidden!r}, num_attention_heads {heads!r}", where=where
        )
    rope = config.get("rope_parameters") or (config.get("rope_scaling") or {})
    fixed = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "head_dim": (config.get("head_dim") or hidden // heads, hidden // heads),
        "quantization_config": (config.get("quantization_config"), None),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        scaling = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": llama.ROPE_CONTEXT}
        fixed |= {f"rope_scaling.{name}": (rope.get(name), value) for name, value in scaling.items()}
    elif kind != "default":
        fixed["rope_scaling.rope_type"] = (kind, "llama3")
    base = rope.get("rope_theta", config.get("rope_theta", 10_000))
    fixed["rope_theta"] = (base, int(base))
    for name, (found, wanted) in fixed.items():
        if found != wanted:
            raise InputError(
                f"{name} is {found!r}; only {wanted!r} can be imported",
                where=where,
                hint="relayrun trains Llamas with RMSNorm, SwiGLU, rotary positions and grouped queries",
            )
    try:
        return Model(
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            rotary_base=int(base),
            rope_scaling_factor=float(rope["factor"]) if kind == "llama3" else None,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            init_method_std=float(config.get("initializer_range", 0.02)),
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
            make_vocab_size_divisible_by=divisible_by,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"does not describe a Llama: {error}", where=where) from None


def _tokenizer_size(folder: Path) -> int | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    return load_tokenizer(TokenizeOptions(tokenizer=str(folder), append_eod="no")).size


def _add_piece(contents: Contents, piece: Piece, size: tuple[int, ...], dtype: torch.dtype, weights: Weights) -> None:
    """`size`: of the whole tensor in the checkpoint."""
    part = (1, *size[1:]) if piece.layer is not None else size
    start = (piece.layer or 0, *[0] * (len(size) - 1))

    def make() -> torch.Tensor:
        tensor = piece.join([weights.read(name)[: shape[0]] for name, shape in piece.shapes.items()]).to(dtype)
        if piece.rows is not None and piece.rows < size[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(size[0] - piece.rows, *size[1:])])
        return tensor.reshape(part).contiguous()

    contents.add_tensor(piece.key, size=size, start=start, part=part, dtype=dtype, make=make)
