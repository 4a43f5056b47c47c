"""The frozen, ordered list of the shards that a run reads.

A manifest is built once, when a run is made, and written into its directory; every attempt reads it
and never looks for shards again, so that a file that appears later cannot shift the data. Building
reads every .idx once (20 bytes per document: about 0.3 s for 10^7 documents); reading and verifying
cost a line of JSON and two `stat` calls per shard.

A fingerprint is the SHA-256 of a shard's whole .idx, with its sizes: documents that were added, cut,
reordered or tokenized otherwise change it. It does not depend on paths, so a data set may move. The
.bin is not read: ids that change while every document keeps its length are not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from relayrun.errors import InputError
from relayrun.files import read_json, write_json
from relayrun.indexed import Shard

VERSION = 1
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard as it was when the manifest was built."""

    prefix: str
    """Absolute path without .bin or .idx, links not resolved."""
    dtype: str
    """numpy's name of the token type, for example `uint16`."""
    tokens: int
    documents: int
    bin_bytes: int
    idx_bytes: int
    fingerprint: str
    """SHA-256 of the .idx, hexadecimal."""

    @classmethod
    def build(cls, prefix: str | os.PathLike[str]) -> ShardEntry:
        """Open a shard and read its whole index.

        Raises InputError if the shard is torn, holds no integers, or if its .bin is not its documents
        one behind the other in the order of the index (windows read the .bin straight through).
        """
        prefix = os.fspath(Path(prefix).absolute())
        try:
            prefix.encode()
        except UnicodeEncodeError:
            raise InputError("the name of a shard must be valid UTF-8", where=repr(prefix),
                             hint="rename it or its folder") from None  # fmt: skip
        shard = Shard.open(prefix)
        if not np.issubdtype(shard.dtype, np.integer):
            raise InputError(f"token ids must be integers, these are {shard.dtype}", where=prefix + ".idx",
                             hint="tokenize it again, or leave this prefix out")  # fmt: skip
        _check_contiguous(shard)
        with open(prefix + ".idx", "rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(prefix=prefix, dtype=shard.dtype.name, tokens=shard.tokens, documents=shard.documents,
                   bin_bytes=shard.bin_bytes, idx_bytes=shard.idx_bytes, fingerprint=fingerprint)  # fmt: skip

    def differences(self) -> list[str]:
        """What differs on disk: a line per missing file or other size."""
        found = []
        for suffix, size in ((".bin", self.bin_bytes), (".idx", self.idx_bytes)):
            try:
                now = os.stat(self.prefix + suffix).st_size
            except (FileNotFoundError, NotADirectoryError):
                found.append(f"{self.prefix}{suffix}: missing")
            else:
                if now != size:
                    found.append(f"{self.prefix}{suffix}: {now} bytes, was {size}")
        return found


@dataclass(frozen=True, kw_only=True)
class DatasetManifest:
    """Shards in the order in which they are read: together one stream of tokens."""

    shards: tuple[ShardEntry, ...]

    @cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over type, sizes and fingerprint of every shard in order, hexadecimal."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.dtype} {shard.tokens} {shard.documents} {shard.bin_bytes} "
                          f"{shard.idx_bytes} {shard.fingerprint}\n".encode())  # fmt: skip
        return digest.hexdigest()

    @classmethod
    def build(cls, prefixes: Sequence[str | os.PathLike[str]]) -> DatasetManifest:
        """Read the indices of `prefixes`; their order is kept. Errors as in `ShardEntry.build`."""
        return cls(shards=tuple(ShardEntry.build(prefix) for prefix in prefixes))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that decides which tokens a run may see."""

    train: DatasetManifest
    validation: dict[str, DatasetManifest]
    vocabulary_size: int
    """Entries of the tokenizer, its special tokens included, not padded."""
    eod: int | None
    """Id of the token that ends a document."""
    tokenizer: str
    """As given in the config; a label, never opened from here."""

    @classmethod
    def build(
        cls,
        train_prefixes: Sequence[str | os.PathLike[str]],
        validation_prefixes: Mapping[str, Sequence[str | os.PathLike[str]]],
        *,
        vocabulary_size: int,
        eod: int | None,
        tokenizer: str,
    ) -> Manifest:
        """Freeze the shards at `train_prefixes` and, by name of the set, at `validation_prefixes`.

        Raises InputError if a set is empty, a shard is refused (`ShardEntry.build`), a shard stands
        twice in one set, or a training shard also stands in a validation set. Links and hard links
        to one .bin are one shard.
        """
        sets = {"train": list(train_prefixes), **{f"validation {name!r}": list(prefixes)
                                                   for name, prefixes in validation_prefixes.items()}}  # fmt: skip
        built = {}
        for name, prefixes in sets.items():
            if not prefixes:
                raise InputError(f"the data set {name} has no shard", hint="give folders that hold .bin and .idx files")
            built[name] = DatasetManifest.build(prefixes)
        train, *validation = built.items()
        in_train = _identities(*train)
        for name, dataset in validation:
            shared = in_train.keys() & _identities(name, dataset).keys()
            if shared:
                first = min(in_train[identity] for identity in shared)
                raise InputError(f"{len(shared)} training shard(s) also stand in {name}; the first is this one",
                                 where=first, hint="held-out data must not be trained on: mend one set")  # fmt: skip
        return cls(
            train=built["train"],
            validation=dict(zip(validation_prefixes, (dataset for _, dataset in validation), strict=True)),
            vocabulary_size=vocabulary_size,
            eod=eod,
            tokenizer=tokenizer,
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `write` wrote. Raises FileNotFoundError, and InputError if it is damaged."""
        try:
            value = read_json(path)
            if value["version"] != VERSION:
                raise ValueError(f"its version is {value['version']}, this program reads {VERSION}")
            return cls(
                train=_dataset(value["train"]),
                validation={name: _dataset(part) for name, part in value["validation"].items()},
                vocabulary_size=value["vocabulary_size"],
                eod=value["eod"],
                tokenizer=value["tokenizer"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = "it is no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else repr(error)
            raise InputError(f"cannot be read as a manifest: {what}", where=path,
                             hint="it is written once and never edited; restore it from a copy") from None  # fmt: skip

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        write_json(path, {
            "version": VERSION,
            "tokenizer": self.tokenizer,
            "vocabulary_size": self.vocabulary_size,
            "eod": self.eod,
            "train": _json(self.train),
            "validation": {name: _json(dataset) for name, dataset in self.validation.items()},
        })  # fmt: skip

    def verify(self) -> None:
        """Compare sizes on disk with the manifest: two `stat` calls per shard, nothing is read.

        Raises InputError that names every difference.
        """
        found = [f"train: {line}" for shard in self.train.shards for line in shard.differences()]
        for name, dataset in self.validation.items():
            found += [f"validation {name!r}: {line}" for shard in dataset.shards for line in shard.differences()]
        if found:
            raise InputError("\n  ".join([f"the data differ from the manifest in {len(found)} file(s):", *found]),
                             hint="put these files back as they were, or start a new run")  # fmt: skip


def _check_contiguous(shard: Shard) -> None:
    lengths, offsets = shard.lengths(), shard.offsets()
    expected = 0
    for start in range(0, shard.sequences, _CHUNK):
        sizes = lengths[start : start + _CHUNK].astype(np.int64) * shard.dtype.itemsize
        ends = expected + np.cumsum(sizes)
        wrong = np.flatnonzero(offsets[start : start + _CHUNK] != ends - sizes)
        if len(wrong) or sizes.min() < 0:
            at = start + int(wrong[0] if len(wrong) else sizes.argmin())
            raise InputError(f"the token file is not its documents one behind the other: sequence {at} of the index "
                             "does not begin where the one before it ends", where=shard.prefix + ".idx",
                             hint="write the shard again in the order of its index, or leave it out")  # fmt: skip
        expected = int(ends[-1])


def _identities(name: str, dataset: DatasetManifest) -> dict[tuple[int, int], str]:
    """(device, inode) of every .bin → prefix."""
    found: dict[tuple[int, int], str] = {}
    for shard in dataset.shards:
        status = os.stat(shard.prefix + ".bin")
        other = found.setdefault((status.st_dev, status.st_ino), shard.prefix)
        if other is not shard.prefix:
            raise InputError(f"stands twice in {name}, also as {other}", where=shard.prefix,
                             hint="name each shard once, or its tokens are repeated within an epoch")  # fmt: skip
    return found


def _json(dataset: DatasetManifest) -> dict[str, Any]:
    return {"fingerprint": dataset.fingerprint, "tokens": dataset.tokens,
            "shards": [asdict(shard) for shard in dataset.shards]}  # fmt: skip


def _dataset(value: dict[str, Any]) -> DatasetManifest:
    dataset = DatasetManifest(shards=tuple(ShardEntry(**shard) for shard in value["shards"]))
    if dataset.fingerprint != value["fingerprint"] or dataset.tokens != value["tokens"]:
        raise ValueError("its shards do not have the fingerprint that it names")
    return dataset
