"""The frozen, ordered lists of the shards, or the files of text, that a run reads; a list for each data set.

The manifest is built when a run is made, and written into its directory; every attempt reads it and never searches for
shards again, so that a file that appears later cannot shift the data. A submit with another mixture adds data sets
(`mixture.data_change`); a listed one never changes. Building reads every .idx once (20 bytes per document: about 0.3 s
for 10^7 documents); reading and verifying cost a line of JSON and two `stat` calls per shard.

A fingerprint is the SHA-256 of a shard's whole .idx, with its sizes: added, cut or reordered documents and other
lengths change it; paths do not, so a data set may move. The .bin is not read: changed ids of equal document lengths
stay unnoticed. The fingerprint of a file of text covers its two ends, where parquet has its list of row groups; its
modification time tells whether it may have been edited between them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from relayrun.errors import InputError, RelayrunError, combined_error
from relayrun.files import read_json, stat_of, write_json
from relayrun.tokens.readers.inventory import first_names
from relayrun.tokens.shards.prefixes import is_repeated_pass
from relayrun.tokens.shards.shard import Shard, ShardRecords
from relayrun.tokens.stores.direct_io import file_checksum

MANIFEST_VERSION = 2
_TOKENIZER_FIELDS = ("tokenizer", "tokenizer_fingerprint", "tokenizer_ids", "vocabulary_size", "eod")


def _size_differences(path: str, size: int) -> list[str]:
    if (now := stat_of(path)) is None:
        return [f"{path}: missing"]
    return [f"{path}: {now.st_size} bytes, was {size}"] if now.st_size != size else []


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard, as found when the manifest was built."""

    prefix: str
    """Absolute path without .bin or .idx, links not resolved."""
    dtype: str
    """Name of the token type in numpy, for example `uint16`."""
    tokens: int
    documents: int
    bin_bytes: int
    idx_bytes: int
    fingerprint: str
    """SHA-256 of the .idx, hexadecimal."""
    pass_of: int | None = None
    """Number of the first shard of the data set that reads the same .bin, in another pass of a mixture."""
    first_token: int = 0
    """First token of the .bin that is read: 0, or the begin of the part that a split leaves."""

    @classmethod
    def build(cls, prefix: str | os.PathLike[str]) -> ShardEntry:
        """Open a shard and read its whole index. Raises InputError if the shard is torn, holds no integers, or if its
        .bin is not the contiguous documents in the order of the index (windows read the .bin straight through)."""
        prefix = os.fspath(Path(prefix).absolute())
        try:
            prefix.encode()
        except UnicodeEncodeError:
            hint = "rename it or its folder"
            raise InputError("the name of a shard must be valid UTF-8", where=repr(prefix), hint=hint) from None
        shard = Shard.open(prefix)
        if not np.issubdtype(shard.dtype, np.integer):
            hint = "tokenize it again, or leave this prefix out"
            raise InputError(f"token ids must be integers, these are {shard.dtype}", where=prefix + ".idx", hint=hint)
        if (gap := shard.first_gap()) is not None:
            raise InputError(
                f"the token file is not its documents one behind the other: sequence {gap} of the index "
                "does not begin where the one before it ends",
                where=prefix + ".idx",
                hint="write the shard again in the order of its index, or leave it out",
            )
        with open(prefix + ".idx", "rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        sizes = {name: getattr(shard, name) for name in ("tokens", "documents", "bin_bytes", "idx_bytes")}
        return cls(prefix=prefix, dtype=shard.dtype.name, fingerprint=fingerprint, **sizes)

    def differences(self) -> list[str]:
        """Describe each missing file and changed size on disk. Shards below URLs are compared when they are opened."""
        if "://" in self.prefix:
            return []
        sizes = ((".bin", self.bin_bytes), (".idx", self.idx_bytes))
        return [line for suffix, size in sizes for line in _size_differences(self.prefix + suffix, size)]


@dataclass(frozen=True, kw_only=True)
class TextFileEntry:
    """One file of text, as found when the manifest was built."""

    path: str
    """Absolute path, links not resolved, or a URL."""
    size: int
    """Bytes."""
    fingerprint: str
    """SHA-256, hexadecimal, of the first and last 64 KiB; of the whole file, if it was edited between them."""
    changed: int = 0
    """Modification time, ns since 1970; 0 if unknown."""
    content: str = ""
    """The xxh3-128 of the whole file; empty if it was never read whole."""
    fragments: int | None = None
    """Only the first row groups up to this number are read; None: all."""
    rows: int | None = None
    """Only the first rows up to this number are read; None: all."""

    def differences(self) -> list[str]:
        """Describe a missing file, a changed size, or a changed modification time on disk. A file of another time is
        read whole, and is unchanged if its content is known and equal. URLs are compared when opened."""
        if "://" in self.path:
            return []
        if found := _size_differences(self.path, self.size):
            return found
        changed = self.changed not in (0, os.stat(self.path).st_mtime_ns)
        same = not changed or (self.content and file_checksum(self.path) == self.content)
        return [] if same else [f"{self.path}: was changed: {self.other_time()}"]

    def other_time(self) -> str:
        """Describe a file of equal size and another modification time."""
        if self.content:
            return "its content is another one"
        when = f"{self.changed // 10**9}.{self.changed % 10**9:09}"
        return f"its time of change is another one (if its content is the same: touch -d @{when} FILE)"


@dataclass(frozen=True, kw_only=True)
class DatasetManifest:
    """Shards in reading order, together one stream of tokens; or files of text, which have no tokens yet."""

    shards: tuple[ShardEntry, ...]
    files: tuple[TextFileEntry, ...] = ()
    """Files of text, sorted by name or as listed; `shards` is then empty."""

    @cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, over type, sizes and fingerprint of every shard in order."""
        digest = hashlib.sha256()
        for shard in self.shards:
            sizes = f"{shard.tokens} {shard.documents} {shard.bin_bytes} {shard.idx_bytes}"
            digest.update(f"{shard.dtype} {sizes} {shard.fingerprint}\n".encode())
        for file in self.files:
            digest.update(f"{file.size} {file.fingerprint} {file.fragments} {file.rows}\n".encode())
        return digest.hexdigest()

    def differences(self) -> list[str]:
        """Describe each difference on disk."""
        entries: list[ShardEntry | TextFileEntry] = [*self.shards, *self.files]
        return [line for entry in entries for line in entry.differences()]

    @classmethod
    def build(cls, prefixes: Sequence[str | os.PathLike[str]]) -> DatasetManifest:
        """Read the indices of `prefixes`, in order. Raises the errors of `ShardEntry.build` for all of them."""
        shards: list[ShardEntry] = []
        bad: list[RelayrunError] = []
        firsts: dict[str, int] = {}
        for prefix in prefixes:
            try:
                shard = ShardEntry.build(prefix)
                first = firsts.setdefault(os.path.realpath(shard.prefix + ".bin"), len(shards))
                shards.append(replace(shard, pass_of=None if first == len(shards) else first))
            except InputError as error:
                bad.append(error)
        if bad:
            raise combined_error(bad, f"of {len(prefixes):,} shards cannot be used")
        return cls(shards=tuple(shards))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All data that decides which tokens a run may read."""

    datasets: dict[str, DatasetManifest]
    """Shards of all data sets that the mixture has ever had, by identity (`DataSource.identity`)."""
    validation: dict[str, DatasetManifest]
    vocabulary_size: int
    """Entries of the tokenizer with its special tokens, not padded."""
    eod: int | None
    """Id of the token that ends a document."""
    tokenizer: str
    """Name of the tokenizer in the config; a label that is never opened."""
    tokenizer_fingerprint: str = ""
    """Fingerprint of the whole tokenizer; empty if unknown."""
    tokenizer_ids: str = ""
    """Fingerprint of the data that decides ids (`encode.tokenizer.ids_fingerprint`); empty if unknown."""

    @classmethod
    def build(
        cls,
        datasets: Mapping[str, Sequence[str | os.PathLike[str]] | DatasetManifest | None],
        validation: Mapping[str, Sequence[str | os.PathLike[str]]],
        *,
        vocabulary_size: int,
        eod: int | None,
        tokenizer: str,
        tokenizer_fingerprint: str = "",
        tokenizer_ids: str = "",
        split: float = 0.0,
    ) -> Manifest:
        """Freeze the shards of each data set and validation set, by name; None: a data set without shards by design. A
        data set of files of text comes frozen. `split`: `data.split`. Raises InputError if a set is empty or a shard is
        refused (`ShardEntry.build`), and as `check_apart`."""
        built: list[dict[str, DatasetManifest]] = []
        for sets, what in ((datasets, "data set"), (validation, "validation set")):
            made: dict[str, DatasetManifest] = {}
            for name, part in sets.items():
                if part is not None and not part:
                    hint = "give folders that hold .bin and .idx files"
                    raise InputError(f"the {what} {name!r} has no shard", hint=hint)
                made[name] = part if isinstance(part, DatasetManifest) else DatasetManifest.build(part or [])
            built.append(made)
        manifest = cls(
            datasets=built[0],
            validation=built[1],
            vocabulary_size=vocabulary_size,
            eod=eod,
            tokenizer=tokenizer,
            tokenizer_fingerprint=tokenizer_fingerprint,
            tokenizer_ids=tokenizer_ids,
        )
        manifest.check_apart(list(datasets), split=split)
        return manifest

    def check_apart(self, mixture: Iterable[str], *, split: float = 0.0) -> None:
        """Raise InputError if text stands twice in a validation set or in the mixture (`doubled_texts`), or in both.
        `mixture` names the data sets that are read together; a data set that left the mixture may be gone from disk.
        Also raises as `check_held_out`."""
        together = set(mixture)
        read = [dataset for name, dataset in self.datasets.items() if name in together]
        for sets in (read, *([dataset] for dataset in self.validation.values())):
            prefixes = [shard.prefix for dataset in sets for shard in dataset.shards]
            doubled_texts(prefixes, [file for dataset in sets for file in dataset.files], refuse=True)
        training, validation = (
            {name: [shard.prefix for shard in dataset.shards] for name, dataset in sets.items()}
            for sets in (self.datasets, self.validation)
        )
        files = [file for dataset in self.datasets.values() for file in dataset.files]
        check_held_out(training, validation, files=files, split=together if split else (), passes_together=True)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a written manifest. Raises FileNotFoundError, and InputError if it is damaged."""
        try:
            value = read_json(path)
            if value["version"] != MANIFEST_VERSION:
                raise ValueError(f"its version is {value['version']}, this program reads {MANIFEST_VERSION}")
            return cls(
                datasets={name: _dataset_from_json(part) for name, part in value["datasets"].items()},
                validation={name: _dataset_from_json(part) for name, part in value["validation"].items()},
                **{name: value[name] for name in _TOKENIZER_FIELDS},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = "it is no JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else repr(error)
            hint = "it is written once and never edited; restore it from a copy"
            raise InputError(f"cannot be read as a manifest: {what}", where=path, hint=hint) from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        value: dict[str, Any] = {"version": MANIFEST_VERSION}
        value |= {name: getattr(self, name) for name in _TOKENIZER_FIELDS}
        value["datasets"] = {name: _dataset_to_json(dataset) for name, dataset in self.datasets.items()}
        value["validation"] = {name: _dataset_to_json(dataset) for name, dataset in self.validation.items()}
        write_json(path, value)

    def differences(self, mixture: Iterable[str]) -> list[str]:
        """Describe differences on disk in the data sets `mixture` and the validation sets; two `stat` calls a shard."""
        found = [f"{name}: {line}" for name in mixture for line in self.datasets[name].differences()]
        for name, dataset in self.validation.items():
            found += [f"validation {name!r}: {line}" for line in dataset.differences()]
        return found

    def verify(self, mixture: Iterable[str] | None = None) -> None:
        """Raise InputError that names every difference on disk. `mixture` as in `differences`; None: all."""
        if found := self.differences(self.datasets if mixture is None else mixture):
            words = "\n  ".join([f"the data differ from the manifest in {len(found)} file(s):", *found])
            raise InputError(words, hint="put these files back as they were, or start a new run")


def check_held_out(
    training: Mapping[str, Sequence[str]],
    validation: Mapping[str, Sequence[str]],
    *,
    files: Iterable[TextFileEntry] = (),
    split: Collection[str] = (),
    passes_together: bool = False,
) -> None:
    """Raise InputError if held-out text is trained on (`ShardRecords.texts`); the sets are prefixes by name. `files`:
    training data that are read as text. `split`: the training sets of which a share is held out; `passes_together`: in
    all passes over a shard of such a set."""
    records = ShardRecords()
    texts = records.texts(prefix for sets in (training, validation) for each in sets.values() for prefix in each)
    held: dict[str, tuple[str, str, str]] = {}
    for name, prefix in [(whole, each) for whole in split for each in training[whole]]:
        record, own = records.of(prefix), (prefix, name, os.path.realpath(prefix + ".bin"))
        others = [("another part of it", "", "")] if record is not None and record.repeats else []
        others += [held.setdefault(text, own) for text in texts[prefix]]
        apart = (each[0] for each in others if each[passes_together:] != own[passes_together:])
        if other := next(apart, None):
            words = f"data.split would hold out text that is trained on: this text also stands in {other}"
            hint = "take some shards out of the data (before a mixture repeats them), and name their folder in"
            raise InputError(words, where=prefix, hint=f"hold out by path: {hint} data.validation")
    places = {text: prefix for each in training.values() for prefix in each for text in texts[prefix]}
    for file in files:
        whole = f"xxh3-128:{file.content}" if file.content else ""
        known = records.texts_of_file(file.path, file.size, whole, f"ends:{file.fingerprint}")
        places |= dict.fromkeys(known, file.path)
    for name, prefixes in validation.items():
        shared = {places[text]: prefix for prefix in prefixes for text in texts[prefix] if text in places}
        if shared:
            first = min(shared)
            there = "" if shared[first] == first else f", whose text is that of {shared[first]}"
            words = f"{len(shared)} training shard(s) also stand in validation {name!r}; the first is this one{there}"
            raise InputError(words, where=first, hint="held-out data must not be trained on: mend one set")


def doubled_texts(prefixes: Sequence[str], files: Sequence[TextFileEntry] = (), *, refuse: bool = False) -> str | None:
    """Describe the shards and raw files of training whose text also stands in another one of them; None if there are
    none, or only passes of a mixture. `refuse`: raise InputError where checksums of tokens are the same; of a raw file
    another column may have been read, and shards without a checksum are compared by their ends."""
    records = ShardRecords()
    texts = records.texts(prefixes)
    for file in files:
        whole = f"xxh3-128:{file.content}" if file.content else ""
        texts[file.path] = {file.path, *records.texts_of_file(file.path, file.size, whole)}
    known = set(prefixes)
    for name, its in texts.items():
        with contextlib.suppress(OSError):  # below a URL
            status = os.stat(name + ".bin" if name in known else name)
            its.add(f"/{status.st_dev}:{status.st_ino}")
    names = [*prefixes, *(file.path for file in files)]
    first: dict[str, int] = {}
    pairs: dict[str, str] = {}
    for number, name in enumerate(names):
        for text in texts[name] or {name}:
            other = names[first.setdefault(text, number)]
            if first[text] != number and not is_repeated_pass(name, other):
                pairs[name] = other
                exact = re.fullmatch(r"[0-9a-f]{32}|(/|\w+://)(?!.* \d+$).*", text, re.DOTALL)  # a checksum or a file
                if refuse and exact:
                    hint = "leave one of them out; text is repeated by the weights of a mixture"
                    raise InputError(f"its text also stands in {other}", where=name, hint=hint)
    if not pairs:
        return None
    shown = first_names([f"{name} has text of {other}" for name, other in pairs.items()])
    return f"text stands twice in the data, and is trained on twice as often as the rest: {shown}"


def _dataset_to_json(dataset: DatasetManifest) -> dict[str, Any]:
    return {
        "fingerprint": dataset.fingerprint,
        "tokens": dataset.tokens,
        "shards": [asdict(shard) for shard in dataset.shards],
        **({"files": [asdict(file) for file in dataset.files]} if dataset.files else {}),
    }


def _dataset_from_json(value: dict[str, Any]) -> DatasetManifest:
    dataset = DatasetManifest(
        shards=tuple(ShardEntry(**shard) for shard in value["shards"]),
        files=tuple(TextFileEntry(**file) for file in value.get("files", ())),
    )
    if dataset.fingerprint != value["fingerprint"] or dataset.tokens != value["tokens"]:
        raise ValueError("its shards do not have the fingerprint that it names")
    return dataset
