"""Source and target of an export, without torch: a checkpoint with its config, tokenizer and data; a new folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.control.rundir import checkpoint_records
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, InputError, RunDirError
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.encode.tokenizer import DocumentTokenizer, ids_fingerprint, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.checkpoint import checksums
from relayrun.train.export.original import original_of_run


@dataclass(frozen=True)
class CheckpointSource:
    """One checkpoint of a run, with the parts of the run that an export needs."""

    run: Run | None
    """None for a checkpoint of another program, which has no records of a run (`megatron_settings`)."""
    iteration: int
    folder: Path
    config: RunConfig
    """Config of the attempt that made the checkpoint."""
    manifest: Manifest
    original: Path | None = None
    """Hugging Face folder that the training began with (`original`)."""
    context: int = 0
    """Longest context that the model is made for, as far as known beside training.seq_length."""

    @cached_property
    def checksum(self) -> str | None:
        """The checksum in its commit; None without one."""
        return checksums.committed_checksum(self.folder)

    @cached_property
    def tokenizer(self) -> DocumentTokenizer:
        """The run's tokenizer. Raises InputError if it is another one than the run began with."""
        found = load_tokenizer(TokenizeOptions(tokenizer=self.config.data.tokenizer, append_eod="auto"))
        whole, ids = self.manifest.tokenizer_fingerprint, self.manifest.tokenizer_ids
        if whole not in ("", found.fingerprint) and ids != ids_fingerprint(found.definition):
            raise InputError(
                "this is not the tokenizer that the run began with: it gives other ids",
                where=self.config.data.tokenizer,
                hint="put the run's tokenizer back as it was",
            )
        return found

    def begins_with(self, bos: int) -> bool | None:
        """Return whether every document that the run reads begins with this token, or none does, as far as the first
        documents of some shards tell; None if some do, or if the data are not there."""
        found: set[bool | None] = set()
        for name, dataset in self.manifest.datasets.items():
            cut = self.config.data.cut_by_document.get(name)
            if cut is not None and cut.bos is not None:
                found.add(cut.bos == bos)
            else:
                found.update(each for entry in dataset.shards[:4] for each in _begin_with(entry.prefix, bos))
                found.update([False] if dataset.files else [])
        return found.pop() if len(found) == 1 else None


def _begin_with(prefix: str, token: int, documents: int = 64) -> set[bool | None]:
    try:
        shard = Shard.open(prefix)
        starts = shard.bounds()[: min(documents, shard.documents)]
        places = shard.offsets()[starts[starts < shard.sequences]] // shard.dtype.itemsize
        return {bool(each) for each in shard.ids()[places] == token}
    except (InputError, OSError, ValueError, IndexError):
        return {None}


def find_checkpoint(run: Run, iteration: int | None = None, *, whole: bool = True) -> CheckpointSource:
    """Return the checkpoint of an iteration; None: the newest whole one. `whole`: refuse a torn or removed one. Raises
    InputError or RunDirError."""
    folder: Path | None
    if iteration is None:
        newest = checkpoint_records.resume_point(run)
        iteration, folder = newest.iteration, Path(newest.path) if newest.path else None
        if folder is None:
            raise InputError("this run has no checkpoint yet", where=run.path)
    else:
        folder = _folder(run, iteration, whole=whole)
    config = resolve.require_native(committed_config(run, iteration))
    return CheckpointSource(
        run=run,
        iteration=iteration,
        folder=folder,
        config=config,
        manifest=Manifest.read(run.manifest),
        original=original_of_run(run),
    )


def committed_config(run: Run, iteration: int) -> CommonConfig:
    """Return the config of the attempt that committed an iteration. Raises RunDirError if the run has no config."""
    numbers = run.revisions()
    if not numbers:
        raise RunDirError("this run has no config", where=run.config)
    return resolve.read_resolved_config(run.config_revision(_revision(run, iteration) or numbers[-1]))


def _folder(run: Run, iteration: int, *, whole: bool) -> Path:
    line = checkpoint_records.Lineage(run).line()
    for commit in line:
        if commit.iteration == iteration:
            if whole and (fault := checkpoint_records.checkpoint_fault(commit)) is not None:
                gone = "was removed: raise checkpoint.keep_last, or evaluation.hold for evaluations that wait"
                words = f"is torn: {fault}" if os.path.lexists(commit.path) else gone
                raise InputError(f"this checkpoint {words}", where=commit.path, hint=_have(line))
            return Path(commit.path)
    raise InputError(f"this run has no checkpoint of iteration {iteration}", where=run.checkpoints, hint=_have(line))


def _have(line: Sequence[CheckpointCommit]) -> str:
    whole = [str(commit.iteration) for commit in line if checkpoint_records.checkpoint_fault(commit) is None]
    return f"whole ones: {', '.join(whole) or 'none'}"


def _revision(run: Run, iteration: int) -> int | None:
    """Return the config revision of the newest attempt that committed this iteration."""
    for number, begin in checkpoint_records.started_attempts_backwards(run):
        if any(commit.iteration == iteration for commit in run.attempt(number).read_commits()):
            return begin.config_revision
    return None


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of `5GB`, `200MB`, `1GiB`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ConfigError(f"{text!r} is no size", where="--max-shard-size", hint="write for example 5GB, or 500MB")
    return int(match[1]) * unit
