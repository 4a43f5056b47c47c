"""A score of an exported folder: lm-evaluation-harness on named tasks, or the mean loss on the validation sets."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from typing import Any

import torch

from relayrun.config.compose.schema import EvaluationSection
from relayrun.control.rundir.evaluations import EvaluationScores, numeric_scores
from relayrun.errors import InputError
from relayrun.tokens.mixture.build_datasets import validation_sets
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.train.export import huggingface
from relayrun.train.export.source_and_target import CheckpointSource
from relayrun.train.export.torch_dist import new_folder


def export_model(checkpoint: CheckpointSource, model: Path) -> None:
    """Make the folder `model`, whole or not at all. Raises like `huggingface.write_huggingface`."""
    with new_folder(model) as made:
        huggingface.write_huggingface(checkpoint, made, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)


def run_tasks(model: Path, settings: EvaluationSection) -> tuple[EvaluationScores, dict[str, Any]]:
    """Run lm-evaluation-harness on the named tasks. Raises InputError if it is not installed."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(
            f"lm-evaluation-harness cannot be imported: {error}",
            where="evaluation.tasks",
            hint="pip install 'relayrun[evaluate]'",
        ) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    answer = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "tokenizer": str(model)},
        tasks=list(settings.tasks),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        batch_size=settings.batch_size,
        device=device,
        task_manager=TaskManager(include_path=settings.include_path),
    )
    return numeric_scores(answer["results"]), {
        "program": f"lm_eval {importlib.metadata.version('lm_eval')}",
        "num_fewshot": settings.num_fewshot,
        "limit": settings.limit,
    }


def held_out_loss(
    checkpoint: CheckpointSource, model: Path, settings: EvaluationSection
) -> tuple[EvaluationScores, dict[str, Any]]:
    """Return mean loss in nats per token, and its exponential, on the windows of the run's own evaluations. Documents
    are separate in rows of `order: document-window` only; `eod_mask_loss` and `mask_tokens_except` mask nothing. Raises
    InputError without a validation set."""
    from transformers import AutoModelForCausalLM

    training = checkpoint.config.training
    orders = validation_sets(checkpoint.config, checkpoint.manifest)
    if not orders:
        raise InputError("there is nothing to evaluate on: neither evaluation.tasks nor a validation set", where="data")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scored: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    found: EvaluationScores = {}
    for name, order in orders.items():
        windows = min(settings.limit or training.eval_steps * training.global_batch_size, len(order))
        sums = [_loss(scored, order.row(number), device) for number in range(windows)]
        if training.resolved_loss_mean == "sample":
            loss = sum(total / max(count, 1.0) for total, count in sums) / windows
        else:
            loss = sum(total for total, _ in sums) / max(1.0, sum(count for _, count in sums))
        found[name] = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "windows": windows}
    return found, {"program": "held-out loss", "seq_length": training.seq_length}


@torch.no_grad()
def _loss(model: Any, row: SampleRow, device: str) -> tuple[float, float]:
    """Return the sum and number of the losses that count in a row; each of its parts is read alone."""
    tokens = torch.from_numpy(row.tokens).long().to(device)
    length = len(tokens) - 1
    mask = torch.ones(length) if row.loss_mask is None else torch.from_numpy(row.loss_mask)
    total, count, at = 0.0, 0.0, 0
    for part in row.lengths or [length]:
        inside, end = mask[at : at + part].to(device), at + part
        if inside.any():
            logits = model(tokens[None, at:end]).logits[0]
            losses = torch.nn.functional.cross_entropy(logits, tokens[at + 1 : end + 1], reduction="none")
            total, count = total + float((losses * inside).sum()), count + float(inside.sum())
        at = end
    return total, count
