"""Two checkpoints in torch_dist format, compared byte for byte."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader


def contents(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, by key and position: tensors and plain values."""
    found: dict[str, Any] = {"common": torch.load(path / "common.pt", weights_only=False)}
    for index, item in FileSystemReader(path).read_metadata().storage_data.items():
        with (path / item.relative_path).open("rb") as file:
            file.seek(item.offset)
            data = io.BytesIO(file.read(item.length))
        key = f"{index.fqn} {tuple(index.offset or ())}"
        assert key not in found
        found[key] = torch.load(data, weights_only=False)
    return found


def raw(value: torch.Tensor) -> bytes:
    """Bytes of a tensor of any type, those that numpy does not know included."""
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts, lists and tuples to one dict of leaves; BytesIO is what torch saved an object as."""
    if isinstance(value, io.BytesIO):
        value = torch.load(value, weights_only=False)
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{name}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, item in enumerate(value) for k, v in flatten(item, f"{name}/{key}").items()}
    return {name: value}


def state_tensors(path: Path) -> dict[str, bytes]:
    """Weights and the optimizer's state by key, without the generators."""
    found = {name: value for name, value in contents(path).items() if isinstance(value, torch.Tensor)}
    return {name: raw(value) for name, value in found.items()}


def assert_same_bytes(one: Path, other: Path) -> int:
    """Compare two checkpoints; return how many tensors they hold."""
    first, second = flatten(contents(one)), flatten(contents(other))
    assert first.keys() == second.keys()
    tensors = 0
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            tensors += 1
            assert value.dtype == second[name].dtype, name
            assert raw(value) == raw(second[name]), name
        else:
            assert value == second[name], name
    return tensors


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its key, put together from its parts, however they were cut."""
    found: dict[str, torch.Tensor] = {}
    metadata = FileSystemReader(path).read_metadata()
    sizes = {
        (key, tuple(chunk.offsets)): (tensor.size, chunk.sizes)
        for key, tensor in metadata.state_dict_metadata.items()
        for chunk in getattr(tensor, "chunks", [])
    }
    for index, item in metadata.storage_data.items():
        place = index.fqn, tuple(index.offset or ())
        if place not in sizes:
            continue
        size, part = sizes[place]
        with (path / item.relative_path).open("rb") as file:
            file.seek(item.offset)
            data = torch.load(io.BytesIO(file.read(item.length)), weights_only=True).reshape(part)
        whole = found.setdefault(index.fqn, torch.full(size, float("nan"), dtype=data.dtype))
        whole[tuple(slice(begin, begin + length) for begin, length in zip(place[1], part, strict=True))] = data
    return found
