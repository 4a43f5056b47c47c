"""The model card: README.md of an exported folder, from the run's own records."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import relayrun
from relayrun.config.training import LossMean
from relayrun.data import audit
from relayrun.errors import InputError
from relayrun.export.checkpoint_source import CheckpointSource
from relayrun.rundir import evaluations, lineage, views
from relayrun.rundir.run import Run
from relayrun.training.model.size import parameters

MEANS: dict[LossMean, str] = {
    "micro_batch": "trained on the mean of micro-batches, reported as the mean over tokens",
    "sample": "the mean over samples",
    "token": "the mean over tokens",
}
"""What a masked loss is the mean over, in words."""

PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")


def text(source: CheckpointSource, *, dtype: str) -> str:
    """Return the model card of an exported checkpoint as Markdown; `dtype` is that of its files.

    Raises InputError if the run has no ledger, or there is no run.
    """
    run = _run(source)
    config, model = source.config, source.config.model
    vocabulary = source.manifest.vocabulary_size
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [llama, relayrun]",
        "---",
        f"# {config.name}",
        "",
        f"A Llama with {parameters(model, vocabulary):,} parameters, trained with relayrun on megatron-core: iteration "
        f"{source.iteration:,} of {config.training.steps:,} of the run `{config.project}/{config.name}`.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH/OF/THIS/FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH/OF/THIS/FOLDER")',
        "```",
        "",
        "## Architecture",
        "",
        *_table(
            ("", ""),
            [
                ("layers", f"{model.num_layers}"),
                ("hidden size, feed-forward size", f"{model.hidden_size:,}, {model.ffn_hidden_size:,}"),
                ("attention heads, key-value heads", f"{model.num_attention_heads}, {model.num_query_groups}"),
                ("vocabulary", f"{vocabulary:,}"),
                ("embeddings and output layer", "two" if model.untie_embeddings_and_output_weights else "one, shared"),
                ("rotary base", f"{model.rotary_base:,}" + _scaling(model.rope_scaling_factor)),
                ("sequence length in training", f"{config.training.seq_length:,}"),
                ("type of these weights", dtype),
            ],
        ),
        "",
        "## Data",
        "",
        *_data(source, run),
        "",
        "## Training",
        "",
        *_training(source, run),
        "",
        "## Versions",
        "",
        f"relayrun {relayrun.__version__}, "
        + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
        + " (of the export).",
        "",
    ]
    return "\n".join(lines)


def _scaling(factor: float | None) -> str:
    return "" if factor is None else f", Llama 3.1's scaling by {factor:g}"


def _data(source: CheckpointSource, run: Run) -> list[str]:
    consumed = consumed_samples(source)
    length = source.config.training.seq_length
    ledger = audit.ledger(replace(audit.audit(run), consumed_samples=consumed))
    rows = [
        (
            row.dataset,
            f"{row.weight:.4g}",
            f"{row.samples:,}",
            f"{row.samples * length:,}",
            f"{row.epochs:.3f}",
        )
        for row in ledger
    ]
    total = ("all", "", f"{consumed:,}", f"{consumed * length:,}", "")
    tokenizer = Path(source.config.data.tokenizer).name
    fingerprint = source.manifest.tokenizer_fingerprint or "unknown"
    untrained = sum(row.untrained for row in ledger)
    return [
        *_table(("data set", "weight", "samples", "tokens", "epochs"), [*rows, total]),
        "",
        f"Tokenizer `{tokenizer}`, SHA-256 of its serialized form {fingerprint}. "
        "Weights are those of the newest mixture; counts are over the whole run."
        + (f" Of all samples that the run read, {untrained:,} were not trained on." if untrained else ""),
    ]


def _training(source: CheckpointSource, run: Run) -> list[str]:
    config = source.config
    metrics = [line for line in views.merged_metrics(run) if line["iteration"] <= source.iteration]
    losses = [line for line in metrics if "loss" in line]
    validation = next((line for line in reversed(metrics) if "validation" in line), None)
    rows = [
        ("tokens", f"{consumed_samples(source) * config.training.seq_length:,}"),
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
        rows.append(("loss", f"without what follows {what}; {MEANS[config.training.resolved_loss_mean]}"))
    if losses:
        rows.append(
            ("training loss", f"{losses[-1]['loss']:.4f} nats per token at iteration {losses[-1]['iteration']:,}")
        )
    if validation is not None:
        rows += [
            (f"loss on {name}", f"{loss:.4f} nats per token at iteration {validation['iteration']:,}")
            for name, loss in validation["validation"].items()
        ]
    for result in evaluations.results(run):
        if result.iteration == source.iteration and result.status == "done":
            program = result.settings.get("program", "")
            rows += [
                (f"{task}: {name}", f"{value:.4g} ({program})")
                for task, values in result.results.items()
                for name, value in values.items()
            ]
    return _table(("", ""), rows)


def consumed_samples(source: CheckpointSource) -> int:
    """Samples that the checkpoint was trained on. Raises InputError if no record says."""
    for commit in lineage.line(_run(source)):
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


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
