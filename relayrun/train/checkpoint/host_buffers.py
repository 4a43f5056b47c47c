"""Layout of host memory buffers in a few large pieces, and the size that torch pins for them; without torch, for
submit.

Pinning takes the driver long, and torch rounds every pinned piece up to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BUFFER_PIECE_BYTES = 1 << 30
"""Bytes of a piece, a power of two; a larger buffer gets a larger piece."""
ALIGNMENT = 512
"""Alignment of buffers in their piece in bytes; a multiple of the size of every type."""


def lay_out_buffers(sizes: Sequence[int], piece: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Place buffers of these sizes in few pieces; all numbers are bytes.

    Returns the piece number and first byte of each buffer, and the lengths of the pieces. Buffers are placed by
    descending size, each in the first piece with room: a piece has `piece` bytes, or the next power of two if its first
    buffer is larger. Its length ends with its last buffer.
    """
    places = [(0, 0)] * len(sizes)
    limits: list[int] = []
    lengths: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        starts = [math.ceil(length / ALIGNMENT) * ALIGNMENT for length in lengths]
        number = next((n for n, start in enumerate(starts) if start + size <= limits[n]), len(lengths))
        if number == len(lengths):
            starts.append(0)
            lengths.append(0)
            limits.append(max(piece, power_of_two(size)))
        places[index] = (number, starts[number])
        lengths[number] = starts[number] + size
    return places, lengths


def power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def pinned_bytes(lengths: Sequence[int]) -> list[int]:
    """Return the bytes that torch pins for pieces of these lengths."""
    return [power_of_two(length) for length in lengths]
