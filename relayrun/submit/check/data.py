"""Check the data of a run: its shards, their tokenizer and token ids, and how often each data set is read.

`build_manifest` finds the shards that a config names, in their order. `data_usage` counts windows and epochs of each
data set, and the step at which a data set is used up.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relayrun.config.compose.schema import DataSource, RunConfig
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError, RelayrunError
from relayrun.files import read_json
from relayrun.submit.check.findings import Findings, count_noun
from relayrun.submit.check.settings import find_placeholders
from relayrun.tokens.mixture.build_datasets import document_order, text_stream, validation_set
from relayrun.tokens.mixture.overlap import measure_overlap
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.order.document_packing import document_cut
from relayrun.tokens.order.remote_shards import freeze_shards
from relayrun.tokens.order.schedule import Schedule, integer_weights
from relayrun.tokens.readers.inventory import first_names, held_out_split
from relayrun.tokens.shards.checks import (
    ALLOW_SETTING,
    MAX_SAMPLED_SHARDS,
    check_first_ids,
    iterate_data_sets,
    shard_tokenizer_errors,
)
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest, check_held_out, doubled_texts
from relayrun.tokens.shards.prefixes import expand_paths, find_prefixes
from relayrun.tokens.shards.shard import ShardRecords, ShardWriter
from relayrun.tokens.stores.urls import is_url
from relayrun.tokens.streams.run_tokenizer import character_token_ids
from relayrun.tokens.tokenize.encode.tokenizer import first_token, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions

log = logging.getLogger(__name__)


def build_manifest(config: RunConfig, run: Run | None = None) -> Manifest:
    """Find the shards that a config names; data sets are named as there, without editions. Raises InputError.

    `run`: whose data they are to be, if it has begun.
    """
    if config.data.mock_data:
        size = config.data.mock_vocabulary_size
        eod = 0 if config.data.depends_on_ends else None  # made-up tokens count up and begin again at 0
        return Manifest.build(dict.fromkeys(config.data.sources), {}, vocabulary_size=size, eod=eod, tokenizer="mock")
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=config.data.tokenizer))
    if config.data.mask_tokens_except is not None:
        character_token_ids(config.data.mask_tokens_except, tokenizer)
    frozen = Manifest.read(run.manifest) if run is not None and run.manifest.exists() and run.revisions() else None
    native: bool = config.trainer == "native"
    manifest = Manifest.build(
        {
            name: _stream_files(name, source, config.data.lanes, frozen)
            if source.is_stream
            else _shard_prefixes(source)
            for name, source in config.data.sources.items()
        },
        {
            name: find_prefixes([Path(folder) for folder in folders], listed=True)
            if native
            else expand_paths([glob.escape(folder) for folder in folders])  # or prefixes, as flags name them
            for name, folders in config.data.validation.items()
        },
        vocabulary_size=tokenizer.size,
        eod=tokenizer.eos_id,
        tokenizer=config.data.tokenizer,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_ids=tokenizer.ids_fingerprint,
        split=config.data.split,
    )
    if config.data.split and not native:  # Megatron-LM would hold out documents of the last pass alone
        training = {name: [shard.prefix for shard in dataset.shards] for name, dataset in manifest.datasets.items()}
        check_held_out(training, {}, split=training)
    return manifest


def _stream_files(name: str, source: DataSource, lanes: int, frozen: Manifest | None) -> DatasetManifest:
    """The files of a data set that is text."""
    from relayrun.tokens.streams.files import (
        freeze_text_files,  # pyarrow, which a submit of token shards may do without
    )

    known = {} if frozen is None else frozen.datasets
    identities = (source.model_copy(update={"edition": edition}).identity(name) for edition in itertools.count(1))
    editions = itertools.takewhile(known.__contains__, identities)
    return freeze_text_files(name, source, lanes, [file for each in editions for file in known[each].files])


def _shard_prefixes(source: DataSource) -> list[str] | DatasetManifest | None:
    """The shards of a data set; None if it has none by design."""
    if not source.paths:
        return None
    if any(is_url(path) for path in source.paths):
        return freeze_shards(source.paths)
    return expand_paths(source.paths)


MAX_PACKED_DOCUMENTS = 1_000_000
"""Documents of a data set of `order: document-window` whose rows a check counts, which takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class DatasetUsage:
    """A data set of the mixture, and the part that the whole run reads."""

    name: str
    shards: int
    documents: int
    tokens: int
    """Tokens of its shards."""
    windows: int | None
    """Samples of one epoch; None if only a user's own order knows, of a stream, or counting takes too long."""
    share: float
    """Its part of the samples."""
    samples: int
    """Samples that the run reads until its last step."""
    used_up_at: int | None
    """The step that reads the last window of its first epoch; None if the run does not come so far."""

    @property
    def epochs(self) -> float | None:
        return self.samples / self.windows if self.windows else None


def data_usage(config: RunConfig, manifest: Manifest, run: Run) -> list[DatasetUsage]:
    """Return the usage of each data set by a run and its past. `manifest` names data sets as the config does."""
    data, training = config.data, config.training
    weights = integer_weights({source.identity(name): source.weight for name, source in data.sources.items()})
    schedule, position = _past_schedule(run, config, weights, data.lanes if data.streams else None)
    samples = position.legs[-1].consumed(max(training.steps, position.iteration))
    counts = schedule.counts(samples)
    total = sum(weights.values())
    found = []
    for name, source in data.sources.items():
        identity = source.identity(name)
        shards, windows = manifest.datasets[name], None
        with contextlib.suppress(RelayrunError):  # said by the look at the shards
            windows = None if source.is_stream else _count_windows(config, manifest, name)
        last = schedule.sample_of(identity, windows - 1) if windows and counts[identity] >= windows else None
        found.append(
            DatasetUsage(
                name=name,
                shards=len(shards.shards),
                documents=shards.documents,
                tokens=shards.tokens,
                windows=windows,
                share=weights[identity] / total,
                samples=counts[identity],
                used_up_at=None if last is None else position.reaches(last + 1),
            )
        )
    return found


def _count_windows(config: RunConfig, manifest: Manifest, name: str) -> int | None:
    """Return the samples of an epoch, None if only a user's own order knows or counting takes too long. Raises
    RelayrunError if ranks would refuse the data set."""
    data, shards, length = config.data, manifest.datasets[name], config.training.seq_length
    if (cut := data.cut_by_document.get(name)) is not None:
        if shards.documents <= MAX_PACKED_DOCUMENTS:
            return len(document_order(config, manifest, name, shards))
        size, where = manifest.vocabulary_size, f"data set {name!r}"
        document_cut(cut, seq_length=length, eod=manifest.eod, vocabulary_size=size, where=where)
    elif data.split and any(is_url(shard.prefix) for shard in shards.shards):
        return None  # ranks read an .idx for it, through the cache of their node
    elif (data.sources[name].order or data.order) == "window":
        return len(WindowOrder(shards, seq_length=length, seed=0, name=name, split=data.split))
    return None


def _past_schedule(
    run: Run, config: RunConfig, weights: Mapping[str, int], lanes: int | None
) -> tuple[Schedule, TrainingProgress]:
    """The schedule that a run has had, with the config's mixture from its position on, and this position.

    A run that has not trained begins at sample 0; so does, for this forecast, one whose record cannot be read.
    """
    sizes = config.training.batch_sizes
    for number in reversed(run.attempt_numbers()):
        try:
            state = read_json(run.attempt(number).data)
            position = TrainingProgress.resume(state["progress"], sizes)
            schedule = Schedule.from_json(state["phases"])
            return schedule.with_phase(position.consumed_samples, weights, lanes), position
        except (OSError, ValueError, KeyError, TypeError, FatalTrainingError):
            continue
    return Schedule.from_weights(weights, lanes), TrainingProgress(sizes)


FEW_EPOCHS = 4.0
"""Epochs above which a check warns: up to here repeated tokens are worth nearly as much as new ones
(arXiv 2305.16264)."""
VERIFY_COMMAND = "relayrun mixture verify"
_OVERLAP_TOKENS = 500_000
"""Tokens of each set that a check compares."""


def check_data(config: RunConfig, run: Run, findings: Findings) -> Manifest | None:
    """Look at the data of a run; return their manifest, without editions, or None if they could not be read."""
    if any(name.startswith("data.") for name, _ in find_placeholders(config)):
        return None  # it is found already, and there is nothing to read
    try:
        manifest = build_manifest(config, run)
    except (RelayrunError, OSError) as error:
        findings.add_error("data.shards", error)
        return None
    if config.data.mock_data:
        findings.ok("data.shards", "made-up tokens: nothing is read", setting="data.mock_data")
        return manifest
    _check_shards(config, manifest, findings)
    together = [manifest.datasets[name] for name in config.data.sources]
    prefixes = [shard.prefix for dataset in together for shard in dataset.shards]
    if (doubled := doubled_texts(prefixes, [file for dataset in together for file in dataset.files])) is not None:
        remedy = "leave one of them out, or give it more weight if it is meant"
        findings.warn("data.doubled", doubled, setting="data", remedy=remedy)
    _check_frames(config, manifest, findings)
    _check_overlap(config, manifest, [prefix for prefix in prefixes if not is_url(prefix)], findings)
    if _check_tokenizer(config, manifest, findings, begun=run.manifest.exists()):
        _check_ids(config, manifest, findings)
    return manifest


def check_usage(config: RunConfig, run: Run, manifest: Manifest, findings: Findings) -> list[DatasetUsage]:
    """Say how often each data set is read; data that are read too often are a warning or an error."""
    found = data_usage(config, manifest, run)
    most = config.data.max_epochs
    for each in found:
        if (epochs := each.epochs) is None:
            continue
        words = (
            f"data set {each.name!r}: {each.tokens:,} tokens are {each.windows:,} windows of "
            f"{config.training.seq_length:,}; {config.training.steps:,} steps read {each.samples:,}, "
            f"{epochs:,.2f} epochs"
        )
        if each.used_up_at is not None:
            words += f"; used up at step {each.used_up_at:,}"
        tell, remedy = findings.ok, None
        if epochs > most:
            remedy = f"give more data or fewer steps; if it is meant, data.max_epochs={-int(-epochs // 1)}"
            tell = findings.refuse
        elif epochs > FEW_EPOCHS:
            remedy = f"tokens that are read more than {FEW_EPOCHS:g} times teach less and less; give more data"
            tell = findings.warn
        tell("data.epochs", words, setting="training.steps", value=round(epochs, 2), remedy=remedy)
    return found


def _check_shards(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    before = len(findings.all)
    for name, source in config.data.sources.items():
        with findings.catching("data.windows"):
            if source.is_stream:
                text_stream(config, manifest, name, manifest.datasets[name])
            else:
                _count_windows(config, manifest, name)
    for name, shards in manifest.validation.items():
        if config.data.validation_cut is None or shards.documents <= MAX_PACKED_DOCUMENTS:
            with findings.catching("data.windows"):
                validation_set(config, manifest, name)
    if len(findings.all) == before:
        _report_streams(config, manifest, findings)
        every = [shards for _, shards in iterate_data_sets(manifest, None) if not shards.files]
        if not every:
            return
        held_out, tokens = len(manifest.validation), sum(shards.tokens for shards in every)
        words = f"{count_noun(sum(len(shards.shards) for shards in every), 'shard')} with {tokens:,} tokens in "
        words += f"{count_noun(len(every) - held_out, 'data set')} and {count_noun(held_out, 'validation set')}"
        findings.ok("data.shards", words)


def _check_overlap(config: RunConfig, manifest: Manifest, training: list[str], findings: Findings) -> None:
    """Say how much of each validation set stands in samples of the training shards and of each stream, and how much of
    a stream stands in other training data."""
    from relayrun.tokens.readers.columns import sample_texts  # pyarrow and tokenizers, as in text_stream
    from relayrun.tokens.streams.samples import StreamEncoder

    with tempfile.TemporaryDirectory() as folder:
        parts = [("the training shards", training)] if training else []
        for name in config.data.streams if manifest.validation or len(config.data.sources) > 1 else ():
            with findings.catching("data.overlap"):
                files, column = manifest.datasets[name].files, config.data.streams[name].column
                if len(texts := sample_texts(column, [file.path for file in files], most_bytes=4 * _OVERLAP_TOKENS)):
                    writer = ShardWriter(f"{folder}/{len(parts)}", np.int32)
                    writer.add(*StreamEncoder(config.data.tokenizer, manifest, files, column)(texts))
                    writer.finish()
                    parts.append((f"a sample of data set {name!r}", [writer.prefix]))
        held = [(f"validation {v!r}", [shard.prefix for shard in of.shards]) for v, of in manifest.validation.items()]
        pairs = [("data.overlap", *pair) for pair in itertools.product(held, parts)]
        pairs += [("data.doubled", *pair) for pair in itertools.combinations(parts[::-1], 2)]
        for subject, (what, first), (where, second) in pairs:
            with findings.catching(subject):
                found = measure_overlap(first, second, most=_OVERLAP_TOKENS)
                remedy = "`relayrun data overlap` reads more of both; leave such documents out of one of them"
                tell = findings.warn if found.large else findings.ok
                tell(subject, f"{what}: {found} of {where}", setting="data", remedy=remedy)


def _check_frames(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    """Warn of documents that begin or end with a token twice or never, or unlike those of another set, by what the
    records of the shards say."""
    data, records = config.data, ShardRecords()
    cuts = {f"data set {name!r}": (manifest.datasets[name], data.cut_by_document.get(name)) for name in data.sources}
    held_out = {f"validation {name!r}": (shards, data.validation_cut) for name, shards in manifest.validation.items()}
    framed: dict[tuple[int | None, int | None], list[str]] = {}
    for what, (shards, cut) in (cuts | held_out).items():
        known = (records.of(shard.prefix) for shard in shards.shards)
        frames = {(each.made.bos, each.made.eos) for each in known if each is not None and each.made is not None}
        end = None if cut is None or cut.eos is False else manifest.eod if cut.eos is True else cut.eos
        for bos, eos in sorted(frames, key=str):
            remedy, words = "set document_window.drop_eod: true", ""
            if cut is None:
                words = "no token ends the documents, which follow each other in a sample" if eos is None else ""
                remedy = "tokenize them with --append-eod, or use data.order: document-window"
            elif eos is None and cut.drop_eod:
                words = "drop_eod asks for a token at the end of each document, and there is none"
                remedy = "set it false"
            elif eos is not None and not cut.drop_eod and eos == end:
                words = f"document_window.eos puts the token {eos} behind documents that end with it already"
            elif bos is not None and bos == cut.bos:
                words = f"document_window.bos puts the token {bos} before documents that begin with it already"
                remedy = "leave document_window.bos out, or tokenize them without --bos"
            if words:
                findings.warn("data.frames", f"{what}: {words}", setting="data.document_window", remedy=remedy)
        for bos, eos in sorted(frames | ({(None, manifest.eod)} if shards.files else set()), key=str):
            last = end if end is not None or (cut is not None and cut.drop_eod) else eos
            framed.setdefault((bos if cut is None or cut.bos is None else cut.bos, last), []).append(what)
    remedy = "tokenize all alike, with --bos if data.tokenizer begins a text so; a stream takes document_window.bos"
    if len(framed) > 1:
        frame = [f"BOS {bos}, EOS {eos}".replace("None", "none") for bos, eos in framed]
        words = "; ".join(f"{first_names(sets)} ({each})" for each, sets in zip(frame, framed.values(), strict=True))
        findings.warn("data.frames", f"documents begin or end with other tokens: {words}", remedy=remedy)
    first = first_token(data.tokenizer) if framed else None
    if first is not None and (bare := [what for (bos, _), sets in framed.items() if bos != first for what in sets]):
        words = f"the tokenizer begins a text with token {first}, and documents of {first_names(bare)} do not begin so"
        findings.warn("data.frames", words, setting="data.tokenizer", remedy=remedy)


def _report_streams(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    """Say what is tokenized as it is read, and which of it is held out by its name; how often it is read nobody knows
    before."""
    splits: dict[str, str | None] = {}
    for name in config.data.streams:
        files = manifest.datasets[name].files
        common = os.path.commonprefix([file.path for file in files])  # noqa: RUF071 - of URLs, too
        front = common.rfind("/", 0, common.rfind("/")) + 1  # the folder above that of all files
        splits |= {file.path: held_out_split(file.path[front:]) for file in files}
        words = f"data set {name!r}: {count_noun(len(files), config.data.sources[name].source + ' file')} with "
        words += f"{sum(file.size for file in files):,} bytes, tokenized as they are read, in {config.data.lanes} lanes"
        findings.ok("data.streams", words, setting="data.lanes")
    if len(set(splits.values())) > 1:
        held = [path for path, split in splits.items() if split]
        words = f"by their names, files of a {splits[held[0]]} set are trained on beside others: {first_names(held)}"
        remedy = "give paths or patterns that leave them out, unless they are meant"
        findings.warn("data.held_out", words, setting="data.mixture", remedy=remedy)


def _check_tokenizer(config: RunConfig, manifest: Manifest, findings: Findings, *, begun: bool) -> bool:
    """Say whose tokenizer made the shards; return whether it is one that the run can take."""
    data, before = config.data, len(findings.errors)
    errors, without = shard_tokenizer_errors(manifest, ends_matter=data.depends_on_ends)
    for error in errors:
        if data.allow_other_tokenizer:
            words = f"taken, as {ALLOW_SETTING} says: {error.where}: {error.message}"
            findings.warn("data.tokenizer", words, setting=ALLOW_SETTING)
        else:
            findings.add_error("data.tokenizer", error)
    for what, prefixes in without.items():
        with findings.catching("data.ids"):
            check_first_ids(prefixes, what, manifest.vocabulary_size)
    if not errors and not without and any(shards.shards for _, shards in iterate_data_sets(manifest, None)):
        findings.ok("data.tokenizer", f"{data.tokenizer} made all of them", setting="data.tokenizer")
    elif without:
        words = f"{sum(map(len, without.values()))} shards do not say which tokenizer made them"
        if config.trainer == "native":
            words += "; ids are checked again as they are read"
        tell = findings.skip if begun else findings.warn
        tell("data.tokenizer", words)
    return len(findings.errors) == before


def _check_ids(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    """Compare the largest id on record with the vocabulary; ids of the other shards are not read here."""
    records, size = ShardRecords(), manifest.vocabulary_size
    every = [(what, each.prefix) for what, shards in iterate_data_sets(manifest, None) for each in shards.shards]
    known = 0
    for what, prefix in every:
        record = records.of(prefix)
        if record is None or (largest := record.largest_id) is None:
            continue
        known += 1
        if largest >= size:
            words = f"{what}: this shard holds the id {largest:,}, which is beyond the vocabulary of {size:,}"
            remedy = "set data.tokenizer to the one that made it"
            findings.refuse("data.ids", words, where=prefix, setting="data.tokenizer", remedy=remedy)
    if known < len(every):
        words = f"the ids of {len(every) - known:,} of {len(every):,} shards were not compared with the vocabulary of "
        words += f"{size:,}: their records do not name the largest (of shards without a record, {MAX_SAMPLED_SHARDS} a "
        words += f"data set were looked at). This reads them all: {VERIFY_COMMAND} FOLDER --tokenizer "
        findings.skip("data.ids", words + config.data.tokenizer)
    elif known:
        findings.ok("data.ids", f"the largest id on record of each of {known:,} shards lies below {size:,}")
