"""Why checkpoints have hashes of their own: torch writes checksums, and never compares them."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("checksums", [True, False])
def test_torch_never_compares_checksums_of_tensors(checksums: bool) -> None:
    """Should it begin to, writing them is worth what it costs."""
    tensor = torch.arange(1000, dtype=torch.float32)
    written = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(tensor, written)
    finally:
        torch.serialization.set_crc32_options(before)
    damaged = bytearray(written.getvalue())
    damaged[damaged.index(tensor.numpy().tobytes()) + 2001] ^= 1
    assert not torch.equal(torch.load(io.BytesIO(bytes(damaged)), weights_only=True), tensor)
