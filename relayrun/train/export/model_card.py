"""The model card: README.md of an exported folder, `templates/model_card.md` with values of the run's records."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, StrictUndefined

import relayrun
from relayrun.config.sections.training import LossMean
from relayrun.control.rundir import checkpoint_records, evaluations, merged_metrics
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.tokens.mixture import audit
from relayrun.train.export.huggingface import HuggingFaceExport
from relayrun.train.export.source_and_target import CheckpointSource

LOSS_MEAN_TEXTS: dict[LossMean, str] = {
    "micro_batch": "trained on the mean of micro-batches, reported as the mean over tokens",
    "sample": "the mean over samples",
    "token": "the mean over tokens",
}
"""Description of the mean of a masked loss."""
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")


def model_card_text(source: CheckpointSource, made: HuggingFaceExport) -> str:
    """Return the model card of an exported checkpoint as Markdown. Raises InputError without a run or its ledger."""
    run, config = _run(source), source.config
    consumed, length = consumed_samples(source), config.training.seq_length
    ledger = audit.dataset_ledgers(replace(audit.audit_run(run), consumed_samples=consumed))
    rows = [
        (row.dataset, f"{row.weight:.4g}", f"{row.samples:,}", f"{row.samples * length:,}", f"{row.epochs:.3f}")
        for row in ledger
    ]
    template = Path(__file__).parent / "templates" / "model_card.md"
    card = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return card.from_string(template.read_text(encoding="utf-8")).render(
        source=source,
        config=config,
        made=made,
        architecture=_architecture(source, made),
        data=[*rows, ("all", "", f"{consumed:,}", f"{consumed * length:,}", "")],
        tokenizer=Path(config.data.tokenizer).name,
        untrained=sum(row.untrained for row in ledger),
        training=_training(source, run, consumed),
        trained_with=_trained_with(source, run),
        exported_with=[
            f"relayrun {relayrun.__version__}",
            *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
        ],
    )


def _architecture(source: CheckpointSource, made: HuggingFaceExport) -> list[tuple[str, object]]:
    model, factor = source.config.model, source.config.model.rope_scaling_factor
    heads = model.num_attention_heads, model.num_query_groups, model.head_channels
    scaling = "" if factor is None else f", Llama 3.1's scaling by {factor:g}"
    return [
        ("layers", model.num_layers),
        ("hidden size, feed-forward size", f"{model.hidden_size:,}, {model.ffn_hidden_size:,}"),
        ("attention heads, key-value heads, channels of a head", ", ".join(map(str, heads))),
        ("vocabulary", f"{source.manifest.vocabulary_size:,}"),
        ("embeddings and output layer", "two" if model.untie_embeddings_and_output_weights else "one, shared"),
        ("rotary base", f"{model.rotary_base:,}{scaling}"),
        ("sequence length in training", f"{source.config.training.seq_length:,}"),
        *model.transformer.of_the_weights.items(),
        ("type of these weights", made.dtype),
    ]


def _trained_with(source: CheckpointSource, run: Run) -> list[str]:
    """Return commit and packages of the attempt that saved the checkpoint, if its records have them."""
    for number in reversed(run.attempt_numbers()):
        attempt = run.attempt(number)
        if not any(commit.iteration == source.iteration for commit in attempt.read_commits()):
            continue
        try:
            said = (run.debug_of(number) / "compute_environment.txt").read_text(encoding="utf-8")
        except (FileNotFoundError, PermissionError):  # it is for the run's owner alone
            return []
        commit = re.search(r"^== code\n.*\ncommit (\S+)", said, re.M)
        changed = re.search(r"^== difference to the commit\nnone$", said, re.M) is None
        found = [f"relayrun at commit {commit[1]}" + (", with changes" if changed else "")] if commit else []
        versions = dict(re.findall(r"^(\S+)==(\S+)$", said, re.M))
        found += [f"{name} {versions[name]}" for name in PACKAGES if name in versions]
        return found
    return []


def _training(source: CheckpointSource, run: Run, consumed: int) -> list[tuple[str, str]]:
    config = source.config
    metrics = [line for line in merged_metrics.valid_lines(run) if line["iteration"] <= source.iteration]
    losses = [line for line in metrics if "loss" in line]
    validation = next((line for line in reversed(metrics) if "validation" in line), None)
    rows = [
        ("tokens", f"{consumed * config.training.seq_length:,}"),
        ("global batch size", f"{config.training.global_batch_size:,} samples"),
        ("precision", config.training.resolved_precision),
        (
            "optimizer",
            f"{config.optimizer.class_path or config.optimizer.name.capitalize()}, "
            f"learning rate {config.optimizer.lr:g} ({config.optimizer.lr_decay_style}), "
            f"weight decay {config.optimizer.weight_decay:g}",
        ),
        ("attempts", f"{len(run.attempt_numbers())}"),
    ]
    if config.data.masks_loss:
        what = "an end of document" if config.data.eod_mask_loss else "the end of a window"
        rows.append(("loss", f"without what follows {what}; {LOSS_MEAN_TEXTS[config.training.resolved_loss_mean]}"))
    if losses:
        rows.append(
            ("training loss", f"{losses[-1]['loss']:.4f} nats per token at iteration {losses[-1]['iteration']:,}")
        )
    if validation is not None:
        rows += [
            (f"loss on {name}", f"{loss:.4f} nats per token at iteration {validation['iteration']:,}")
            for name, loss in validation["validation"].items()
        ]
    for result in evaluations.evaluation_results(run):
        if result.iteration == source.iteration and result.status == "done":
            program = result.settings.get("program", "")
            rows += [
                (f"{task}: {name}", f"{value:.4g} ({program})")
                for task, values in result.results.items()
                for name, value in values.items()
            ]
    return rows


def consumed_samples(source: CheckpointSource) -> int:
    """Return the number of samples that the checkpoint was trained on. Raises InputError without a record."""
    for commit in checkpoint_records.Lineage(_run(source)).line():
        if commit.iteration == source.iteration and commit.consumed_samples >= 0:
            return commit.consumed_samples
    raise InputError(
        "no record says how many samples this checkpoint was trained on",
        where=source.folder,
        hint="export it without --readme",
    )


def _run(source: CheckpointSource) -> Run:
    if source.run is None:
        raise InputError("this checkpoint has no records of a run", where=source.folder, hint="leave out --readme")
    return source.run
