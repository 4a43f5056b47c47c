"""Merge several shards into one by moving bytes; tokens are not decoded.

The result equals that of Megatron-LM's `tools/merge_datasets.py`: the concatenated .bin files and one index; plus a
record, which names the tokenizer of the inputs and the checksums of both files. Each input is compared with the
checksums of its record on the way, since its bytes pass through memory anyway: past the page cache this costs no more
than `cat`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from relayrun import files
from relayrun.errors import InputError, refuse_unwritable, refuse_urls
from relayrun.tokens.shards.shard import (
    RECORD_SUFFIX,
    Shard,
    ShardRecord,
    ShardRecords,
    TokenizerRecord,
    encode_index,
    write_shard_record,
)
from relayrun.tokens.stores.direct_io import DirectFile

log = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes read, hashed and written at a time, which stay in the processor's cache."""


def merge_shards(prefixes: Sequence[str], output: str | os.PathLike[str], *, multimodal: bool = False) -> Shard:
    """Write the shards `prefixes`, in this order, as the shard `output`; return it.

    `multimodal`: the indices, and the result's, hold a mode of every sequence. The final names appear when the shard is
    whole. Raises InputError for a torn shard, a shard that differs from its record, different token types or (by their
    records) tokenizers, and if `output` exists or is one of the inputs. Warns if an input without a record leaves the
    tokenizer of the result unnamed.
    """
    target = os.path.abspath(output)
    inputs = inspect_inputs(prefixes, output, multimodal=multimodal)
    with files.exclusive_maker(Path(target)) as held:
        if not held:
            hint = "wait for it, or choose another name"
            raise InputError("another merge writes this output", where=target, hint=hint)
        _refuse_existing(target)  # again: another merge may have ended since
        files.remove_leftovers(Path(target).parent, shared=True)
        _write_merged(inputs, target, [os.path.abspath(prefix) for prefix in prefixes], multimodal=multimodal)
    return Shard.open(target, multimodal=multimodal)


def _write_merged(inputs: MergeInputs, target: str, prefixes: list[str], *, multimodal: bool) -> None:
    """Write temporary files, then rename them; remove all of them on a failure."""
    shards, known, dtype = inputs.shards, inputs.records, inputs.shards[0].dtype
    folder = Path(target).parent
    tokens, index_file = (str(folder / f"{files.temporary_prefix()}{secrets.token_hex(8)}") for _ in range(2))
    made = [tokens, index_file]
    try:
        with DirectFile(tokens) as out:
            digest = xxhash.xxh3_128()
            for shard, record in zip(shards, known, strict=True):
                _append_shard(shard, {} if record is None else record.xxh3_128, out, digest)
            os.fsync(out.fileno())
        bounds, sequences = [np.zeros(1, np.int64)], 0
        for shard in shards:
            bounds.append(np.asarray(shard.bounds())[1:] + sequences)
            sequences += shard.sequences
        lengths = np.concatenate([np.asarray(shard.lengths()) for shard in shards])
        index = encode_index(lengths, np.concatenate(bounds), dtype)
        if multimodal:
            index += b"".join(np.asarray(shard.modes()).tobytes() for shard in shards)
        with open(index_file, "wb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        sums = {"bin": digest.hexdigest(), "idx": xxhash.xxh3_128_hexdigest(index)}
        largest = _largest_id(shards, known)
        own = ShardRecord(made=inputs.made, xxh3_128=sums, largest_id=largest, texts=inputs.texts)
        try:
            files.rename_no_replace(tokens, target + ".bin")
            made += [target + ".bin", target + RECORD_SUFFIX]
            write_shard_record(target, own, merged=prefixes)
            files.rename_no_replace(index_file, target + ".idx")
        except FileExistsError:
            _refuse_existing(target)
            raise
    except BaseException:
        for path in made:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        raise
    files.fsync_directory(folder)


@dataclass(frozen=True)
class MergeInputs:
    """The shards of a merge, the record of each, and the tokenizer on record of all of them."""

    shards: list[Shard]
    records: list[ShardRecord | None]
    made: TokenizerRecord | None
    texts: frozenset[str]
    """Text names (`ShardRecords.texts`) of all inputs."""

    @property
    def bytes(self) -> int:
        """Size of the merged shard, about."""
        return sum(shard.tokens * shard.dtype.itemsize + shard.idx_bytes for shard in self.shards)


def inspect_inputs(prefixes: Sequence[str], output: str | os.PathLike[str], *, multimodal: bool = False) -> MergeInputs:
    """Check inputs and output of a merge, without reading tokens. Raises InputError as `merge_shards`."""
    refuse_urls(output)
    target = os.path.abspath(output)
    shards = [Shard.open(prefix, multimodal=multimodal) for prefix in prefixes]
    if not shards:
        raise InputError("there is no shard to merge")
    _refuse_existing(target)
    refuse_unwritable(Path(target).parent)
    dtype = shards[0].dtype
    if other := next((shard for shard in shards if shard.dtype != dtype), None):
        words = f"token types differ: {other.dtype} here, {dtype} in {shards[0].prefix}"
        raise InputError(words, where=other.prefix, hint="merge shards of one tokenizer alone")
    records, real_path = ShardRecords(), files.RealPathCache()
    known = [records.of(real_path(prefix + ".bin").removesuffix(".bin")) for prefix in prefixes]
    texts = frozenset().union(*records.texts(prefixes).values())
    return MergeInputs(shards, known, _common_tokenizer(prefixes, known, target), texts)


def _refuse_existing(target: str) -> None:
    for suffix in (".bin", ".idx"):
        if os.path.exists(target + suffix):
            raise InputError("this exists already", where=target + suffix, hint="move it away, or choose another name")


def _common_tokenizer(
    prefixes: Sequence[str], records: Sequence[ShardRecord | None], target: str
) -> TokenizerRecord | None:
    """The tokenizer that all inputs have on record; None, with a warning, if an input has none. Raises InputError if
    two differ, or end documents with different tokens."""
    found = [(prefix, record.made) for prefix, record in zip(prefixes, records, strict=True) if record is not None]
    known = [(prefix, made) for prefix, made in found if made is not None]
    for prefix, made in known:
        first, other = known[0]
        if made.ids != other.ids:
            what = "another tokenizer made this shard than"
        elif made.eos != other.eos:
            what = f"documents end with {_describe_token(made.eos)} here, with {_describe_token(other.eos)} in"
        else:
            continue
        raise InputError(f"{what} {first}", where=prefix, hint="merge shards of one tokenizer alone")
    if len(known) < len(prefixes):
        why = f"{len(prefixes) - len(known)} of {len(prefixes)} inputs have none on record"
        log.warning("%s: its record will name no tokenizer, since %s", target, why)
        return None
    return known[0][1]


def _largest_id(shards: Sequence[Shard], records: Sequence[ShardRecord | None]) -> int | None:
    """Return the largest id of all inputs; None if unknown for any of them, or all are empty."""
    full = [record for shard, record in zip(shards, records, strict=True) if shard.tokens]
    noted = [None if record is None else record.largest_id for record in full]
    known = [largest for largest in noted if largest is not None]
    return max(known) if known and len(known) == len(noted) else None


def _describe_token(id_: int | None) -> str:
    return "no token" if id_ is None else f"the token {id_}"


def _append_shard(shard: Shard, sums: dict[str, str], out: DirectFile, digest: xxhash.xxh3_128) -> None:
    """Append the tokens of `shard` to `out`; its offsets must be contiguous from 0. Raises InputError if its files do
    not have the checksums `sums` of its record, if any."""
    left = shard.tokens * shard.dtype.itemsize
    if shard.first_gap() is not None:
        raise InputError("sequences of this shard do not lie one behind the other", where=shard.prefix)
    own = xxhash.xxh3_128()
    with open(shard.prefix + ".bin", "rb", buffering=0) as source:
        while left:
            piece = out.reserve(min(left, _PIECE)).data
            read = source.readinto(piece)
            if not read:
                raise InputError("this token file became shorter while it was read", where=shard.prefix + ".bin")
            digest.update(piece[:read])
            if sums:
                own.update(piece[:read])
            out.commit(read)
            left -= read
    if not sums or shard.cut:  # a cut shard has the record of the whole one
        return
    index = xxhash.xxh3_128_hexdigest(Path(shard.prefix + ".idx").read_bytes())
    for suffix, found in (("bin", own.hexdigest()), ("idx", index)):
        if sums.get(suffix, found) != found:
            words = f"the .{suffix} is not what its record says (xxh3-128)"
            hint = "tokenize its dump again, which makes this shard anew, or leave it out"
            raise InputError(words, where=f"{shard.prefix}.{suffix}", hint=hint)
