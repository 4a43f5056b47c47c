"""The shards of a run: whether they are there, whose tokenizer made them, their ids, and how often they are read."""

from __future__ import annotations

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.files import RealPathCache
from relayrun.submit.check.find_data import build_manifest
from relayrun.submit.check.findings import Findings, count_noun
from relayrun.submit.check.settings import find_placeholders
from relayrun.submit.check.usage import MAX_PACKED_DOCUMENTS, WINDOW_ORDERS, DatasetUsage, data_usage
from relayrun.tokens.mixture.build_datasets import document_order, text_stream, validation_set
from relayrun.tokens.order.document_order import document_cut
from relayrun.tokens.order.samples import WindowOrder
from relayrun.tokens.shards.made_by import (
    ALLOW_SETTING,
    MAX_SAMPLED_SHARDS,
    check_first_ids,
    iterate_data_sets,
    tokenizer_differences,
)
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.record import ShardRecords

FEW_EPOCHS = 4.0
"""How often tokens may be read before it is a warning: up to here they are worth nearly what new ones are
(arXiv 2305.16264)."""
VERIFY_COMMAND = "relayrun mixture verify"


def check_data(config: RunConfig, run: Run, findings: Findings) -> Manifest | None:
    """Look at the data of a run; return their manifest, without editions, or None where they could not be read."""
    if any(name.startswith("data.") for name, _ in find_placeholders(config)):
        return None  # it is found already, and there is nothing to read
    manifest = None
    with findings.catching("data.shards"):
        manifest = build_manifest(config, run)
    if manifest is None:
        return None
    if config.data.mock_data:
        findings.ok("data.shards", "made-up tokens: nothing is read", setting="data.mock_data")
        return manifest
    _check_shards(config, manifest, findings)
    if _check_tokenizer(config, manifest, findings, begun=run.manifest.exists()):
        _check_ids(config, manifest, findings)
    return manifest


def check_usage(config: RunConfig, run: Run, manifest: Manifest, findings: Findings) -> list[DatasetUsage]:
    """Say how often each data set is read; data that are read too often are a warning or an error."""
    found = data_usage(config, manifest, run)
    most = config.data.max_epochs
    for each in found:
        epochs = each.epochs
        if epochs is None:
            continue
        words = (
            f"data set {each.name!r}: {each.tokens:,} tokens are {each.windows:,} windows of "
            f"{config.training.seq_length:,}; {config.training.steps:,} steps read {each.samples:,}, "
            f"{epochs:,.2f} epochs"
        )
        if each.used_up_at is not None:
            words += f"; used up at step {each.used_up_at:,}"
        if epochs > most:
            findings.refuse(
                "data.epochs",
                words,
                setting="training.steps",
                value=round(epochs, 2),
                remedy=f"give more data or fewer steps; if it is meant, data.max_epochs={-int(-epochs // 1)}",
            )
        elif epochs > FEW_EPOCHS:
            findings.warn(
                "data.epochs",
                words,
                setting="training.steps",
                value=round(epochs, 2),
                remedy=f"tokens that are read more than {FEW_EPOCHS:g} times teach less and less; give more data",
            )
        else:
            findings.ok("data.epochs", words, setting="training.steps", value=round(epochs, 2))
    return found


def _check_shards(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    length, split = config.training.seq_length, config.data.split
    before = len(findings.all)
    for name, source in config.data.sources.items():
        if source.is_stream:
            with findings.catching("data.windows"):
                text_stream(config, manifest, name, manifest.datasets[name])
        elif (cut := config.data.cut_by_document.get(name)) is not None:
            size, where = manifest.vocabulary_size, f"data set {name!r}"
            with findings.catching("data.windows"):
                if manifest.datasets[name].documents <= MAX_PACKED_DOCUMENTS:
                    document_order(config, manifest, name, manifest.datasets[name])
                else:
                    document_cut(cut, seq_length=length, eod=manifest.eod, vocabulary_size=size, where=where)
        elif (source.order or config.data.order) in WINDOW_ORDERS:
            with findings.catching("data.windows"):
                WindowOrder(manifest.datasets[name], seq_length=length, seed=0, name=name, split=split)
    for name, shards in manifest.validation.items():
        if config.data.validation_cut is None or shards.documents <= MAX_PACKED_DOCUMENTS:
            with findings.catching("data.windows"):
                validation_set(config, manifest, name)
    if len(findings.all) == before:
        _report_streams(config, manifest, findings)
        every = [shards for _, shards in iterate_data_sets(manifest, None) if not shards.files]
        if not every:
            return
        findings.ok(
            "data.shards",
            f"{count_noun(sum(len(shards.shards) for shards in every), 'shard')} with "
            f"{sum(shards.tokens for shards in every):,} tokens in "
            f"{count_noun(len(every) - len(manifest.validation), 'data set')} and "
            f"{count_noun(len(manifest.validation), 'validation set')}",
        )


def _report_streams(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    """Say what is tokenized as it is read; how often it is read nobody knows before."""
    for name in config.data.streams:
        files = manifest.datasets[name].files
        findings.ok(
            "data.streams",
            f"data set {name!r}: {count_noun(len(files), config.data.sources[name].source + ' file')} with "
            f"{sum(file.size for file in files):,} bytes, tokenized as they are read, in {config.data.lanes} lanes",
            setting="data.lanes",
        )


def _check_tokenizer(config: RunConfig, manifest: Manifest, findings: Findings, *, begun: bool) -> bool:
    """Say whose tokenizer made the shards; return whether it is one that the run can take."""
    data, before = config.data, len(findings.errors)
    errors, without = tokenizer_differences(manifest, ends_matter=data.depends_on_ends)
    for error in errors:
        if data.allow_other_tokenizer:
            findings.warn(
                "data.tokenizer",
                f"taken, as {ALLOW_SETTING} says: {error.where}: {error.message}",
                setting=ALLOW_SETTING,
            )
        else:
            with findings.catching("data.tokenizer"):
                raise error
    for what, prefixes in without.items():
        with findings.catching("data.ids"):
            check_first_ids(prefixes, what, manifest.vocabulary_size)
    if not errors and not without and any(shards.shards for _, shards in iterate_data_sets(manifest, None)):
        findings.ok("data.tokenizer", f"{data.tokenizer} made all of them", setting="data.tokenizer")
    elif without:
        words = f"{sum(map(len, without.values()))} shards do not say which tokenizer made them"
        if config.trainer == "native":
            words += "; ids are checked again as they are read"
        if begun:
            findings.ok("data.tokenizer", words)
        else:
            findings.warn("data.tokenizer", words)
    return len(findings.errors) == before


def _check_ids(config: RunConfig, manifest: Manifest, findings: Findings) -> None:
    """Compare the largest id on record with the vocabulary; ids of the other shards are not read here."""
    records, real_path, size = ShardRecords(), RealPathCache(), manifest.vocabulary_size
    known = 0
    unknown: list[str] = []
    for what, shards in iterate_data_sets(manifest, None):
        for shard in shards.shards:
            record = records.of(real_path(shard.prefix + ".bin").removesuffix(".bin"))
            largest = None if record is None else record.largest_id
            if largest is None:
                unknown.append(shard.prefix)
                continue
            known += 1
            if largest >= size:
                findings.refuse(
                    "data.ids",
                    f"{what}: this shard holds the id {largest:,}, which is beyond the vocabulary of {size:,}",
                    where=shard.prefix,
                    setting="data.tokenizer",
                    remedy="set data.tokenizer to the one that made it",
                )
    if unknown:
        findings.ok(
            "data.ids",
            f"the ids of {len(unknown):,} of {known + len(unknown):,} shards were not compared with the vocabulary of "
            f"{size:,}: their records do not name the largest (of shards without a record, {MAX_SAMPLED_SHARDS} a data set were "
            f"looked at). This reads them all: {VERIFY_COMMAND} FOLDER --tokenizer {config.data.tokenizer}",
        )
    elif known:
        findings.ok("data.ids", f"the largest id on record of each of {known:,} shards lies below {size:,}")
