"""Hugging Face folders: export of config, weights, tokenizer; import as a torch_dist checkpoint of iteration 0.

An export writes one file at a time: memory holds the tensors of one file and one piece of the checkpoint, for any size
and layout. An import copies one tensor at a time, and adds `model.yaml`, the `model` section of a fitting run config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection
from relayrun.config.sections.model import TransformerSection
from relayrun.errors import InputError
from relayrun.files import read_json, write_json
from relayrun.progress import Progress, count
from relayrun.publishing import InputFiles
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.checkpoint.parallel_load import size_batches
from relayrun.train.export import megatron_state, model_families
from relayrun.train.export.model_mapping import MappedTensor, ModelMapping
from relayrun.train.export.original import (
    ORIGINAL_NAME,
    Original,
    carried_files,
    copy_files,
    keep_original,
    read_huggingface_config,
)
from relayrun.train.export.source_and_target import CheckpointSource
from relayrun.train.export.torch_dist import CheckpointReader, TorchDistSavePlan, new_folder
from relayrun.train.model.size import pad_to_multiple

ROPE_CONTEXT = 8192
"""Original context of Llama 3.1's rotary scaling in megatron-core and the schema."""
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ROPE_CONTEXT}
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "rope_theta": 10_000.0}
"""Defaults of transformers for a config.json, unless a mapping has others."""


def to_huggingface_config(mapping: ModelMapping, source: CheckpointSource, *, dtype: str) -> dict[str, Any]:
    """Return the values of config.json, for every version of transformers that has the class."""
    model, seq_length = source.config.model, source.config.training.seq_length
    own, base = model.transformer, float(model.rotary_base)
    scaling, context = None, max(seq_length, source.context)
    if model.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": float(model.rope_scaling_factor), **_SCALING}
        context = max(context, int(ROPE_CONTEXT * model.rope_scaling_factor))
    return {
        "architectures": [mapping.architecture],
        "model_type": mapping.model_type,
        "vocab_size": source.manifest.vocabulary_size,
        **{name: getattr(model, setting) for name, setting in model_families.CONFIG_NAMES.items()},
        "head_dim": model.head_channels,
        "max_position_embeddings": context,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": base},  # of transformers 5
        "rope_theta": base,
        "rope_scaling": scaling,
        "attention_dropout": 0.0,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": source.manifest.eod,
        "torch_dtype": dtype,
        "use_cache": True,
        **mapping.config,
        **{name: value for key, name in mapping.settings.items() if (value := getattr(own, key)) is not None},
    }


def from_huggingface_config(
    mapping: ModelMapping, config: Mapping[str, Any], divisible_by: int, *, where: object
) -> ModelSection:
    """Return the model section for a config.json of transformers 4 or 5. Raises InputError if no run can train it."""
    config = {**_DEFAULTS, **mapping.defaults, **{name: value for name, value in config.items() if value is not None}}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise InputError(
            f"does not describe {mapping.with_article}: hidden_size {hidden!r}, num_attention_heads {heads!r}",
            where=where,
        )
    config.setdefault("num_key_value_heads", heads)
    rope = config.get("rope_parameters") or (config.get("rope_scaling") or {})
    # without an entry or a default transformers uses False or None
    missing = {name: False if isinstance(value, bool) else None for name, value in mapping.config.items()}
    fixed = {name: (config.get(name, missing[name]), value) for name, value in mapping.config.items()}
    fixed["quantization_config"] = (config.get("quantization_config"), None)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        fixed |= {f"rope_scaling.{name}": (rope.get(name), value) for name, value in _SCALING.items()}
    elif kind != "default":
        fixed["rope_scaling.rope_type"] = (kind, "llama3")
    base = rope.get("rope_theta", config["rope_theta"])
    fixed["rope_theta"] = (base, int(base))
    for name, (found, wanted) in fixed.items():
        if found != wanted:
            raise InputError(
                f"{name} is {found!r}; only {wanted!r} can be imported",
                where=where,
                hint=f"a run can train {mapping.with_article} that has it so; see `relayrun help export`",
            )
    transformer = dict(mapping.transformer) | {
        setting: config[name] for setting, name in mapping.settings.items() if config.get(name) is not None
    }
    if transformer.get("kv_channels") == hidden // heads:
        del transformer["kv_channels"]
    try:
        return ModelSection(
            **{setting: config[name] for name, setting in model_families.CONFIG_NAMES.items()},
            rotary_base=int(base),
            rope_scaling_factor=float(rope["factor"]) if kind == "llama3" else None,
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
            make_vocab_size_divisible_by=divisible_by,
            transformer=TransformerSection.model_validate(transformer),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"does not describe {mapping.with_article}: {error}", where=where) from None


def write_tokenizer(source: CheckpointSource, folder: Path, original: Original) -> int | None:
    """Write the run's tokenizer for transformers, and the files that only the original has. Return the token that
    begins a text, None without one. Raises InputError for a tokenizer that is missing or another one."""
    tokenizer = source.tokenizer
    given = Path(source.config.data.tokenizer)
    beside = given.parent if given.is_file() and given.name == "tokenizer.json" else given
    if beside.is_dir():
        copy_files(beside, carried_files(beside), folder)
    elif given.is_file():
        copy_files(given.parent, [given.name], folder)
        (folder / given.name).rename(folder / "tokenizer.json")
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source.config.data.tokenizer).save_pretrained(folder)
    _add_files_of_original(source, folder, original)
    file, eod = folder / "tokenizer.json", source.manifest.eod
    if file.exists() and (definition := read_json(file)).get("model", {}).get("dropout"):  # no training text had it
        definition["model"]["dropout"] = None
        write_json(file, definition)
    if not (folder / "tokenizer_config.json").exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": None if eod is None else tokenizer.tokenizer.id_to_token(eod),
        }
        write_json(folder / "tokenizer_config.json", settings)
    return _frame_texts(source, folder, original)


def _add_files_of_original(source: CheckpointSource, folder: Path, original: Original) -> None:
    names = [] if original.folder is None else carried_files(original.folder, links=False)
    if original.folder is None or not names:
        return
    try:
        options = TokenizeOptions(tokenizer=str(original.folder), append_eod="no")
        original.same_tokenizer = load_tokenizer(options).ids_fingerprint == source.tokenizer.ids_fingerprint
    except InputError:
        original.same_tokenizer = False
    changed = [
        name
        for name in names
        if (folder / name).exists() and not cmp(folder / name, original.folder / name, shallow=False)
    ]
    if original.same_tokenizer:
        copy_files(original.folder, [name for name in names if not (folder / name).exists()], folder)
    if changed or not original.same_tokenizer:
        why = "as in data.tokenizer" if original.same_tokenizer else "the tokenizer is another one"
        original.differences.append(f"{why}, not as in the original: {', '.join(changed or names)}")


def _frame_texts(source: CheckpointSource, folder: Path, original: Original) -> int | None:
    """Let the tokenizer begin a text as the run's documents begin. Return the token that begins a text."""
    try:
        bos = load_tokenizer(TokenizeOptions(tokenizer=str(folder), append_eod="no", bos=True)).bos_id
    except InputError:  # it has no such token
        bos = None
    cuts = {cut.bos for cut in source.config.data.cut_by_document.values() if cut.bos is not None}
    bos = cuts.pop() if len(cuts) == 1 else bos
    if bos is None or not (folder / "tokenizer.json").exists():
        return bos
    definition, path = Tokenizer.from_file(str(folder / "tokenizer.json")), folder / "tokenizer_config.json"
    begins, token = source.begins_with(bos), definition.id_to_token(bos)
    if token is None:
        return None
    framed = definition.encode("").tokens
    added = framed[:1] == [token]
    if begins and not added:
        if framed:
            words = f"the tokenizer frames a text by {' '.join(framed)}; the run's documents begin with {token}"
            original.differences.append(words)
            return bos
        single, pair = f"{token}:0 $A:0", f"{token}:0 $A:0 {token}:1 $B:1"
        parts = [definition.post_processor, processors.TemplateProcessing(single, pair, [(token, bos)])]
        definition.post_processor = processors.Sequence([part for part in parts if part is not None])
        definition.save(str(folder / "tokenizer.json"))
    if begins:
        write_json(path, read_json(path) | {"bos_token": token, "add_bos_token": True})
    elif begins is False and added:
        original.differences.append(f"the tokenizer begins a text with {token}; no document of the run begins so")
    return bos


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_SIZE = 5_000_000_000
"""Largest bytes of a safetensors file, as in transformers; a larger tensor has its own file."""


@dataclass(frozen=True)
class HuggingFaceExport:
    """Weights of an export."""

    parameters: int
    bytes: int
    """Bytes of the weights in the folder."""
    files: int
    notes: tuple[str, ...] = ()
    """Differences from the original, and from the type that was asked for, one line each."""
    rounded: torch.dtype | None = None
    """Type of the checkpoint's weights, if the exported ones are the optimizer's fp32 weights."""


def write_huggingface(
    source: CheckpointSource, folder: Path, *, dtype: str, max_shard_size: int, mapping: str | None = None
) -> HuggingFaceExport:
    """Write config, weights and tokenizer into the existing `folder` (`torch_dist.new_folder`). `mapping`: import path
    of a mapping; None for the mapping of the run's config, or a built-in one. Raises InputError if checkpoint or
    tokenizer do not belong to the run, or no mapping fits, ConfigError if the path leads to none, and any error of
    `save_file`."""
    model, vocabulary = source.config.model, source.manifest.vocabulary_size
    chosen = model_families.mapping_for_model(model, mapping)
    reader = CheckpointReader(source.folder, source.checksum)
    padded = pad_to_multiple(vocabulary, model.make_vocab_size_divisible_by)
    chosen.check(reader.shapes, model, padded, source.folder)
    of = reader.dtype if dtype == "auto" else DTYPES[dtype]
    name = next(name for name, value in DTYPES.items() if value is of)
    made = to_huggingface_config(chosen, source, dtype=name)
    original = Original.read(source.original, made, padded)
    made |= {"vocab_size": original.vocab_size, "bos_token_id": write_tokenizer(source, folder, original)}
    generation = {name: made[name] for name in ("bos_token_id", "eos_token_id")}
    seq_length = source.config.training.seq_length
    write_json(folder / "config.json", original.complete_config(made, seq_length, dtype_asked=dtype != "auto"))
    write_json(folder / "generation_config.json", original.complete_generation(generation))
    keys = chosen.keys(model, reader.shapes)
    weights, rounded = megatron_state.weights_as(of, reader, [*keys.values()], original.differences)
    pieces = [replace(piece, key=keys[piece.key]) for piece in chosen.pieces(model, made["vocab_size"])]
    constants = {key: torch.tensor(value) for key, value in chosen.constants_of(model.num_layers).items()}
    files, parameters = _write_weights(weights, pieces, constants, folder, name, max_shard_size)
    return HuggingFaceExport(parameters, parameters * of.itemsize, files, tuple(original.differences), rounded)


def _write_weights(
    reader: CheckpointReader | megatron_state.Fp32Weights,
    pieces: Sequence[MappedTensor],
    constants: Mapping[str, torch.Tensor],
    folder: Path,
    dtype_name: str,
    max_shard_size: int,
) -> tuple[int, int]:
    """Return the numbers of files and parameters. `constants` go into the last file."""
    dtype = DTYPES[dtype_name]
    files = size_batches(pieces, max_shard_size, lambda piece: piece.parameters * dtype.itemsize)
    index: dict[str, str] = {}
    parameters = sum(piece.parameters for piece in pieces)
    with Progress("writing", parameters, "parameters"):
        for number, part in enumerate(files, 1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors = {key: value for piece in part for key, value in read_mapped_tensor(reader, piece, dtype).items()}
            if number == len(files):
                tensors |= {key: value.to(dtype) for key, value in constants.items()}
            save_file(tensors, folder / name, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": (parameters + len(constants)) * dtype.itemsize}, "weight_map": index},
        )
    return len(files), parameters


def read_mapped_tensor(
    reader: CheckpointReader | megatron_state.Fp32Weights, piece: MappedTensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return one piece of the model under Hugging Face's names."""
    outer, shape = len(piece.index), reader.shapes[piece.key]
    inner = shape[outer:] if piece.rows is None else (piece.rows, *shape[outer + 1 :])
    start = (*piece.index, *[0] * len(inner))
    tensor = reader.read(piece.key, start=start, shape=(*[1] * outer, *inner), dtype=dtype)
    count(tensor.numel())
    parts = piece.split(tensor.reshape(inner))
    return {name: part.reshape(size) for (name, size), part in zip(piece.shapes.items(), parts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceImport:
    """Checkpoint of an import, and its values in a run config."""

    model: ModelSection
    vocabulary: int
    """Rows of the embeddings from the folder; the padding after them is zero."""
    padded_vocabulary: int
    notes: tuple[str, ...] = ()
    """Losses of the import, one line each."""


class HuggingFaceWeights:
    """Tensors of a Hugging Face folder: one file, or several with an index."""

    def __init__(self, folder: Path) -> None:
        """Open the weights in `folder`. Raises InputError without safetensors, and for a missing or torn file."""
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                self._files: dict[str, str] = read_json(index)["weight_map"]
            else:
                with safe_open(folder / "model.safetensors", "pt") as file:
                    self._files = dict.fromkeys(file.keys(), "model.safetensors")
            self.shapes: dict[str, tuple[int, ...]] = {}
            self.types: dict[str, str] = {}
            for name in sorted(set(self._files.values())):
                with safe_open(folder / name, "pt") as file:
                    parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                    self.shapes |= {key: tuple(part.get_shape()) for key, part in parts.items()}
                    self.types |= {key: part.get_dtype() for key, part in parts.items()}
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
    folder: Path,
    output: Path,
    *,
    dtype: str = "auto",
    divisible_by: int = 128,
    mapping: str | None = None,
    read: InputFiles | None = None,
) -> HuggingFaceImport:
    """Write the checkpoint `output`, whole or not at all. `divisible_by`: the run's model.make_vocab_size_divisible_by.
    `mapping`: import path of a mapping; None for the built-in one of the folder's class. Raises InputError if no run
    config can describe the model in `folder`, or `output` cannot be written, and ConfigError if the path leads to no
    mapping."""
    config, where = read_huggingface_config(folder), folder / "config.json"
    chosen = model_families.mapping_for_config(config, mapping, where=where)
    model = from_huggingface_config(chosen, config, divisible_by, where=where)
    if mapping is not None:
        model = model.model_copy(update={"mapping": mapping})
    weights = HuggingFaceWeights(folder)
    rows, vocabulary = int(config["vocab_size"]), None
    if (folder / "tokenizer.json").is_file():
        vocabulary = load_tokenizer(TokenizeOptions(tokenizer=str(folder), append_eod="no")).size
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
    if size < rows:  # the tokenizer does not use all rows: they are kept as part of the padding
        size = divisible_by = pad_to_multiple(rows, divisible_by)
        model = model.model_copy(update={"make_vocab_size_divisible_by": size})
    shapes = chosen.megatron_shapes(model, size)
    first = next(iter(wanted))
    of = weights.read(first).dtype if dtype == "auto" else DTYPES[dtype]
    wider = sum(weights.types[name] == "F32" for name in wanted) if of.itemsize < 4 else 0
    with new_folder(output, read) as made:
        contents = TorchDistSavePlan()
        for piece in chosen.pieces(model, rows):
            _add_piece(contents, piece, shapes[piece.key], of, weights)
        contents.add_extra_states(shapes)
        written = contents.write(made, {"iteration": 0})
        (made / "model.yaml").write_text(
            f"# the model of {folder.absolute()}\n" + yaml_file.dump_yaml({"model": model.model_dump(mode="json")})
        )
        keep_original(folder, made / ORIGINAL_NAME)
        written.add_checksums(0)
    notes = (
        (f"{wider} of {len(wanted)} tensors are float32 there: rounded; --dtype float32 keeps them",) if wider else ()
    )
    return HuggingFaceImport(model=model, vocabulary=rows, padded_vocabulary=size, notes=notes)


def _add_piece(
    contents: TorchDistSavePlan,
    piece: MappedTensor,
    size: tuple[int, ...],
    dtype: torch.dtype,
    weights: HuggingFaceWeights,
) -> None:
    outer = len(piece.index)
    part = (*[1] * outer, *size[outer:])
    start = (*piece.index, *[0] * (len(size) - outer))

    def make() -> torch.Tensor:
        tensor = piece.join([weights.read(name)[: shape[0]] for name, shape in piece.shapes.items()]).to(dtype)
        if piece.rows is not None and piece.rows < size[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(size[0] - piece.rows, *size[1:])])
        return tensor.reshape(part).contiguous()

    contents.add_tensor(piece.key, size=size, start=start, part=part, dtype=dtype, make=make)
