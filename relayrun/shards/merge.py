"""Several shards into one, by moving bytes: no token is looked at.

The result is that of Megatron-LM's `tools/merge_datasets.py`: the .bin files one behind the other, and one
index. Bytes are copied inside the kernel (`copy_file_range`), which shares blocks where the file system can.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relayrun.errors import InputError
from relayrun.files import fsync_directory
from relayrun.shards.indexed import Shard, index_bytes
from relayrun.shards.made_by import Records

_PIECE = 1 << 26


def merge(prefixes: Sequence[str], output: str | os.PathLike[str]) -> Shard:
    """Write the shards `prefixes`, in this order, as the shard `output`; return it.

    Nothing stands under the final names before the shard is whole. Raises InputError for a torn shard, for
    token types or tokenizers (by their records) that differ, or if `output` exists or is one of the inputs.
    """
    target = os.path.abspath(output)
    shards = [Shard.open(prefix) for prefix in prefixes]
    if not shards:
        raise InputError("there is no shard to merge")
    for suffix in (".bin", ".idx"):
        if os.path.exists(target + suffix):
            raise InputError("this exists already", where=target + suffix, hint="move it away, or choose another name")
    dtype = shards[0].dtype
    if other := next((shard for shard in shards if shard.dtype != dtype), None):
        raise InputError(
            f"token types differ: {other.dtype} here, {dtype} in {shards[0].prefix}",
            where=other.prefix,
            hint="merge shards of one tokenizer alone",
        )
    records = Records()
    known = [(prefix, made) for prefix in prefixes if (made := records.of(prefix)) is not None]
    if odd := next((prefix for prefix, made in known if not made.same(known[0][1])), None):
        raise InputError(
            f"another tokenizer made this shard than {known[0][0]}",
            where=odd,
            hint="merge shards of one tokenizer alone",
        )
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(target + ".bin.tmp", "wb") as out:
            for shard in shards:
                _append(shard, out.fileno())
            os.fsync(out.fileno())
        bounds, sequences = [np.zeros(1, np.int64)], 0
        for shard in shards:
            bounds.append(np.asarray(shard.bounds())[1:] + sequences)
            sequences += shard.sequences
        lengths = np.concatenate([np.asarray(shard.lengths()) for shard in shards])
        with open(target + ".idx.tmp", "wb") as index:
            index.write(index_bytes(lengths, np.concatenate(bounds), dtype))
            index.flush()
            os.fsync(index.fileno())
    except BaseException:
        for suffix in (".bin.tmp", ".idx.tmp"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target + suffix)
        raise
    os.replace(target + ".bin.tmp", target + ".bin")
    os.replace(target + ".idx.tmp", target + ".idx")
    fsync_directory(Path(target).parent)
    return Shard.open(target)


def _append(shard: Shard, out: int) -> None:
    """The tokens of `shard` behind what `out` holds; its offsets must run without gaps from 0."""
    left = shard.tokens * shard.dtype.itemsize
    lengths = np.asarray(shard.lengths(), np.int64)
    if len(lengths) and not np.array_equal(shard.offsets(), (np.cumsum(lengths) - lengths) * shard.dtype.itemsize):
        raise InputError("sequences of this shard do not lie one behind the other", where=shard.prefix)
    source = os.open(shard.prefix + ".bin", os.O_RDONLY)
    try:
        while left:
            try:
                moved = os.copy_file_range(source, out, min(left, _PIECE))
            except OSError:  # another file system, or one that cannot
                moved = os.sendfile(out, source, None, min(left, _PIECE))
            if not moved:
                raise InputError("this token file became shorter while it was read", where=shard.prefix + ".bin")
            left -= moved
    finally:
        os.close(source)
