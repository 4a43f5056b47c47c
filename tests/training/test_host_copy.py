"""Host memory for the copies of saves: few pieces, once, and what lies in them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import xxhash

from relayrun.train.checkpoint import async_writer
from relayrun.train.checkpoint.async_writer import HostCopy, HostMemoryStats
from relayrun.train.checkpoint.host_buffers import ALIGNMENT, lay_out_buffers

CPU = torch.device("cpu")


@dataclass
class Shard:
    """What a copy looks at in megatron-core's ShardedTensor, whose import takes seconds."""

    key: str
    data: torch.Tensor
    global_offset: tuple[int, ...] = (0, 0)


def shard(name: str, data: torch.Tensor) -> Any:
    return Shard(name, data)


def shards() -> list[Any]:
    """Some of every kind: types of 1 to 8 bytes, no dimension, no elements, not contiguous, larger than a piece."""
    generator = torch.Generator().manual_seed(1)
    return [
        shard("weights", torch.randn(70, 33, generator=generator).to(torch.bfloat16)),
        shard("moments", torch.randn(70, 33, generator=generator)),
        shard("turned", torch.randn(11, 7, generator=generator).t()),
        shard("one", torch.tensor(3.25, dtype=torch.float64)),
        shard("bytes", torch.arange(5, dtype=torch.uint8)),
        shard("none", torch.zeros(0, 4)),
        shard("large", torch.randn(3000, generator=generator)),
        *(shard(f"small {number}", torch.full((number + 1,), float(number))) for number in range(40)),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_buffers_lie_in_few_pieces_aligned_and_apart(seed: int) -> None:
    generator = random.Random(seed)
    piece = 1 << 16
    sizes = [generator.choice([0, 1, 4, generator.randrange(9000), generator.randrange(90_000)]) for _ in range(200)]
    places, lengths = lay_out_buffers(sizes, piece)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (number, start) in zip(sizes, places, strict=True):
        assert start % ALIGNMENT == 0
        taken.setdefault(number, []).append((start, start + size))
    assert sorted(taken) == list(range(len(lengths)))
    for number, parts in taken.items():
        parts.sort()
        assert all(before <= after for (_, before), (after, _) in itertools.pairwise(parts))
        largest = max(stop - start for start, stop in parts)
        assert lengths[number] == max(stop for _, stop in parts)
        assert lengths[number] <= max(piece, 1 << max(0, largest - 1).bit_length())
    # no two pieces are half empty: what is in one of them would have gone into the other
    rounded = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert len(lengths) <= 1 + 2 * rounded / piece


def test_thousands_of_buffers_need_a_handful_of_pieces() -> None:
    """A rank of an 8B model, one of 64: bf16 weights, and fp32 weights and moments, of each parameter a 64th."""
    layer = [6144 * 4096, 4096 * 4096, 28_672 * 4096, 4096 * 14_336, 4096, 4096]
    held = [elements // 64 for elements in [128_256 * 4096] * 2 + layer * 32 + [4096]]
    sizes = [2 * elements for elements in held] + [4 * elements for elements in held] * 3
    places, lengths = lay_out_buffers(sizes, 1 << 30)
    assert len(places) == 780
    assert len(lengths) == 2
    assert sum(lengths) < sum(sizes) + 780 * ALIGNMENT
    assert lay_out_buffers([], 1 << 30) == ([], [])


def test_what_is_reserved_is_used_by_every_save_and_holds_the_bytes_of_each() -> None:
    host = HostCopy(CPU, piece=4096)
    reserved = host.reserve(shards())
    assert reserved.pieces == 6
    assert sum(one.data.nbytes for one in shards()) <= reserved.size <= reserved.pieces * 4096 + 3 * 16384
    assert host.reserve(shards()) == HostMemoryStats(0, 0), "all are there"
    addresses = set()
    for number in range(3):
        originals, copies = shards(), shards()
        for original, copy in zip(originals, copies, strict=True):
            original.data += number
            copy.data += number
        assert host.fill(copies, None) == HostMemoryStats(0, 0)
        addresses.add(tuple(copy.data.data_ptr() for copy in copies))
        for original, copy in zip(originals, copies, strict=True):
            assert torch.equal(copy.data, original.data)
            assert (copy.data.dtype, copy.data.shape) == (original.data.dtype, original.data.shape)
            assert copy.data.data_ptr() != original.data.data_ptr() or not copy.data.numel()
            # torch's writer would copy what has a larger storage
            assert copy.data.untyped_storage().nbytes() == copy.data.nbytes
            assert copy.data.data_ptr() % copy.data.element_size() == 0
    assert len(addresses) == 1


def test_what_was_not_reserved_or_has_another_shape_by_now_is_allocated_at_the_save() -> None:
    host = HostCopy(CPU)
    host.reserve([shard("a", torch.zeros(3)), shard("b", torch.zeros(3))])
    changed = [shard("a", torch.ones(4)), shard("b", torch.ones(3).to(torch.float16)), shard("c", torch.ones(2))]
    assert host.fill(changed, None) == HostMemoryStats(2 * ALIGNMENT + 6, 1)
    assert [one.data.tolist() for one in changed] == [[1.0] * 4, [1.0] * 3, [1.0] * 2]
    assert host.reserve(changed) == HostMemoryStats(0, 0)


def test_without_so_much_memory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostCopy(CPU, piece=4096)
    empty = torch.empty
    calls: list[int] = []

    def refuse(size: int, **options: object) -> torch.Tensor:
        calls.append(size)
        if len(calls) == 3:
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        host.reserve(shards())
    assert host.reserve(shards()).pieces == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_buffers_are_pinned() -> None:
    device = torch.device("cuda", 0)
    host = HostCopy(device)
    there = [shard("weights", torch.arange(1000.0, device=device)), shard("bytes", torch.ones(7, device=device))]
    assert host.reserve(there) == HostMemoryStats(8192, 1)
    host.fill(there, host.new_stream())
    assert all(one.data.is_pinned() for one in there)
    assert there[0].data.tolist() == list(range(1000))


@pytest.mark.parametrize("piece", [64, 1 << 12, 1 << 22])
def test_every_copy_has_the_digest_of_its_values(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what is copied in several parts, of what is not contiguous, and beside what has no elements."""
    monkeypatch.setattr(async_writer, "COPY_CHUNK_BYTES", 1000)
    copy = HostCopy(CPU, piece=piece)
    for _ in range(2):  # buffers are used again
        every = shards()
        copy.fill(every, None)
        digests = copy.digests()
        assert len(digests) == len([one for one in every if one.data.nbytes])
        for one in every:
            if one.data.nbytes:
                raw = one.data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert digests[one.data.data_ptr()] == xxhash.xxh3_128_hexdigest(raw), one.key
