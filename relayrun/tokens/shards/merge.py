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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from relayrun import files, leftovers, publishing
from relayrun.errors import InputError, refuse_unwritable, refuse_urls
from relayrun.progress import Progress, count
from relayrun.tokens.shards.shard import (
    RECORD_SUFFIX,
    Shard,
    ShardRecord,
    ShardRecords,
    TokenizerRecord,
    encode_index,
    write_shard_record,
)
from relayrun.tokens.stores.direct_io import DirectFile, file_checksum

log = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes read, hashed and written at a time, which stay in the processor's cache."""


def merge_shards(prefixes: Sequence[str], output: str | os.PathLike[str], *, multimodal: bool = False) -> Shard:
    """Write the shards `prefixes`, in this order, as the shard `output`; return it. `multimodal`: the indices hold a
    mode of every sequence. Raises InputError for a torn shard, a shard that differs from its record, different token
    types or (by their records) tokenizers, and if `output` exists or is one of the inputs. Warns if an input without a
    record leaves the tokenizer of the result unnamed."""
    target, names = os.path.abspath(output), [os.path.abspath(prefix) for prefix in prefixes]
    if (done := _finished_merge(target, names, multimodal=multimodal)) is not None:
        leftovers.remove_leftovers(Path(target).parent, shared=True)
        log.info("%s: this is done already", target)
        return done
    read = publishing.InputFiles(_paths(names))
    inputs = inspect_inputs(prefixes, output, multimodal=multimodal)
    with publishing.output_lock(Path(target)):
        _refuse_existing(target, names)  # again: another merge may have ended since
        if (free := files.free_space(target)) < inputs.bytes:
            words = f"the merged shard takes {inputs.bytes:,} bytes, and {free:,} are free"
            raise InputError(words, where=Path(target).parent, hint="make room, or choose another place")
        _write_merged(inputs, read, target, names, multimodal=multimodal)
    return Shard.open(target, multimodal=multimodal)


def _finished_merge(target: str, prefixes: Sequence[str], *, multimodal: bool) -> Shard | None:
    """Return the shard `target` if a merge of these shards, none of which changed since, has finished it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, InputError):
        record = files.read_json(target + RECORD_SUFFIX)
        made = os.stat(target + RECORD_SUFFIX).st_mtime_ns
        parts = [os.stat(path) for path in _paths(prefixes)]
        index = xxhash.xxh3_128_hexdigest(Path(target + ".idx").read_bytes())
        same = record["merged"] == prefixes and record["xxh3_128"]["idx"] == index
        if same and max(part.st_mtime_ns for part in parts) < made:
            shard = Shard.open(target, multimodal=multimodal)
            return shard if file_checksum(target + ".bin") == record["xxh3_128"]["bin"] else None
    return None


def refuse_stale_merge(output: str | os.PathLike[str], prefixes: Sequence[str]) -> None:
    """Raise InputError if one of these shards is not in the merged shard `output` by its record."""
    records = ShardRecords()
    merged = records.of(os.fspath(output))
    for prefix in prefixes if merged is not None and merged.texts else ():
        record = records.of(prefix)
        if record is not None and merged is not None and record.xxh3_128.get("bin", "") not in {"", *merged.texts}:
            words = f"it is stale: {prefix} was made again since"
            hint = "move it, its .idx and its .record.json away, and merge again"
            raise InputError(words, where=f"{os.fspath(output)}.bin", hint=hint)


def _paths(prefixes: Sequence[str]) -> list[str]:
    return [prefix + suffix for prefix in prefixes for suffix in (".bin", ".idx")]


def _write_merged(
    inputs: MergeInputs, read: publishing.InputFiles, target: str, prefixes: list[str], *, multimodal: bool
) -> None:
    """Write temporary files, then rename them, the .idx last: without it nothing is a shard."""
    shards, known, dtype = inputs.shards, inputs.records, inputs.shards[0].dtype
    tokens, index_file = (leftovers.temporary_name(Path(target)) for _ in range(2))
    made = [str(tokens), str(index_file), f"{tokens}{RECORD_SUFFIX}"]
    try:
        with DirectFile(str(tokens)) as out, Progress("merging", inputs.bytes):
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
        index_file.write_bytes(index)
        files.fsync_file(index_file)
        sums = {"bin": digest.hexdigest(), "idx": xxhash.xxh3_128_hexdigest(index)}
        largest = _largest_id(shards, known)
        texts, repeats = inputs.texts, inputs.repeats
        own = ShardRecord(made=inputs.made, xxh3_128=sums, largest_id=largest, texts=texts, repeats=repeats)
        read.check()
        write_shard_record(str(tokens), own, merged=prefixes)
        try:
            _remove_half_published(target, prefixes, sums)
            for suffix, path in ((RECORD_SUFFIX, f"{tokens}{RECORD_SUFFIX}"), (".bin", tokens), (".idx", index_file)):
                leftovers.rename_no_replace(path, target + suffix)
                made.append(target + suffix)
        except FileExistsError:
            _refuse_existing(target, [])
            raise
    except BaseException:
        for path in made:
            leftovers.surely_remove(path)
        raise
    files.fsync_directory(Path(target).parent)


def _is_half_published(target: str, prefixes: Sequence[str]) -> bool:
    """Return whether a killed merge of the same shards has published its record, and perhaps its .bin, and no .idx."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return bool(files.read_json(target + RECORD_SUFFIX)["merged"] == prefixes) and not os.path.lexists(
            target + ".idx"
        )
    return False


def _remove_half_published(target: str, prefixes: Sequence[str], sums: dict[str, str]) -> None:
    """Remove what a killed merge of the same shards has published; its .bin only if its bytes are these."""
    if not _is_half_published(target, prefixes):
        return
    if os.path.lexists(target + ".bin"):
        if file_checksum(target + ".bin") != sums["bin"]:
            raise FileExistsError
        os.unlink(target + ".bin")
    os.unlink(target + RECORD_SUFFIX)


@dataclass(frozen=True)
class MergeInputs:
    """The shards of a merge, the record of each, and the tokenizer on record of all of them."""

    shards: list[Shard]
    records: list[ShardRecord | None]
    made: TokenizerRecord | None
    texts: frozenset[str]
    """Text names (`ShardRecords.texts`) of all inputs."""
    repeats: bool
    """Two inputs have the same text, or one of them repeats text."""

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
    _refuse_existing(target, [os.path.abspath(prefix) for prefix in prefixes])
    refuse_unwritable(Path(target).parent)
    dtype = shards[0].dtype
    if other := next((shard for shard in shards if shard.dtype != dtype), None):
        words = f"token types differ: {other.dtype} here, {dtype} in {shards[0].prefix}"
        raise InputError(words, where=other.prefix, hint="merge shards of one tokenizer alone")
    records = ShardRecords()
    known = [records.of(prefix) for prefix in prefixes]
    texts = [*map(records.texts(prefixes).__getitem__, prefixes)]
    every = frozenset().union(*texts)
    repeats = len(every) < sum(map(len, texts)) or any(record is not None and record.repeats for record in known)
    return MergeInputs(shards, known, _common_tokenizer(prefixes, known, target), every, repeats)


def _refuse_existing(target: str, prefixes: Sequence[str]) -> None:
    """Raise InputError if the shard `target` exists, unless a killed merge of the same shards has left it half made."""
    for suffix in (".bin", ".idx", RECORD_SUFFIX):
        if os.path.lexists(target + suffix) and not _is_half_published(target, prefixes):
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
        elif made.bos != other.bos:
            what = f"documents begin with {_describe_token(made.bos)} here, with {_describe_token(other.bos)} in"
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
            count(read)
    if not sums or shard.cut:  # a cut shard has the record of the whole one
        return
    index = xxhash.xxh3_128_hexdigest(Path(shard.prefix + ".idx").read_bytes())
    for suffix, found in (("bin", own.hexdigest()), ("idx", index)):
        if sums.get(suffix, found) != found:
            words = f"the .{suffix} is not what its record says (xxh3-128)"
            hint = "tokenize its dump again, which makes this shard anew, or leave it out"
            raise InputError(words, where=f"{shard.prefix}.{suffix}", hint=hint)
