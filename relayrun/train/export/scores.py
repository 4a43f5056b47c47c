"""A score of an exported folder: lm-evaluation-harness on named tasks, or the mean loss on the validation sets."""

from __future__ import annotations

import importlib.metadata
import math
import os
from pathlib import Path
from typing import Any

import torch

from relayrun.config.compose.schema import EvaluationSection
from relayrun.control.rundir.evaluations import EvaluationScores, numeric_scores
from relayrun.errors import InputError
from relayrun.files import read_json
from relayrun.tokens.mixture.build_datasets import validation_sets
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.train.export import huggingface
from relayrun.train.export.source_and_target import CheckpointSource
from relayrun.train.export.torch_dist import new_folder


def export_model(checkpoint: CheckpointSource, model: Path) -> None:
    """Make the folder `model`, whole or not at all. Raises like `huggingface.write_huggingface`."""
    with new_folder(model) as made:
        huggingface.write_huggingface(checkpoint, made, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)


def visible_gpus(settings: EvaluationSection, of_run: int) -> int:
    """Return the GPUs of this job, which alone this process uses then. Raises InputError if the job asks for some and
    torch sees none."""
    found, wanted = torch.cuda.device_count(), settings.job.gpus(of_run)
    if wanted and not found:
        words = f"the job asks for {wanted} GPUs, and torch {torch.__version__} sees none"
        raise InputError(words, where="evaluation.job", hint="set evaluation.job.gpus_per_node=0 to evaluate on CPUs")
    if wanted < found:  # the local scheduler gives a job no GPUs of its own; CUDA has not begun
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given.split(",")[:wanted])
    return min(found, wanted)


def model_arguments(model: Path, source: CheckpointSource | None, *, gpus: int) -> dict[str, Any]:
    """Return the arguments of lm_eval's model. `source`: None for a folder alone."""
    found = {"pretrained": str(model), "tokenizer": str(model), "dtype": "auto", "parallelize": gpus > 1}
    bos = read_json(model / "config.json").get("bos_token_id")
    if source is not None and isinstance(bos, int) and (begins := source.begins_with(bos)) is not None:
        found["add_bos_token"] = begins
    return found


def run_tasks(
    source: CheckpointSource | None, model: Path, settings: EvaluationSection, *, gpus: int
) -> tuple[EvaluationScores, dict[str, Any]]:
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
    arguments = model_arguments(model, source, gpus=gpus)
    answer = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=list(settings.tasks),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        batch_size=settings.batch_size,
        device="cuda" if gpus else "cpu",
        task_manager=TaskManager(include_path=settings.include_path),
    )
    return numeric_scores(answer["results"]), {
        "program": f"lm_eval {importlib.metadata.version('lm_eval')}",
        "num_fewshot": settings.num_fewshot,
        "limit": settings.limit,
        **{name: value for name, value in arguments.items() if name not in ("pretrained", "tokenizer")},
    }


def held_out_loss(
    checkpoint: CheckpointSource, model: Path, settings: EvaluationSection, *, gpus: int
) -> tuple[EvaluationScores, dict[str, Any]]:
    """Return mean loss in nats per token, and its exponential, on the windows of the run's own evaluations, on GPUs in
    the type of the weights, else in fp32. Documents are separate in rows of `order: document-window` only;
    `eod_mask_loss` and `mask_tokens_except` mask nothing. Raises InputError without a validation set."""
    from transformers import AutoModelForCausalLM

    training = checkpoint.config.training
    orders = validation_sets(checkpoint.config, checkpoint.manifest)
    if not orders:
        raise InputError("there is nothing to evaluate on: neither evaluation.tasks nor a validation set", where="data")
    spread = {"device_map": "auto"} if gpus > 1 else {}
    scored: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto" if gpus else torch.float32, **spread).eval()
    scored = scored.to("cuda") if gpus == 1 else scored
    found: EvaluationScores = {}
    for name, order in orders.items():
        windows = min(settings.limit or training.eval_steps * training.global_batch_size, len(order))
        sums = [_loss(scored, order.row(number), scored.device) for number in range(windows)]
        if training.resolved_loss_mean == "sample":
            loss = sum(total / max(count, 1.0) for total, count in sums) / windows
        else:
            loss = sum(total for total, _ in sums) / max(1.0, sum(count for _, count in sums))
        found[name] = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "windows": windows}
    dtype = str(scored.dtype).removeprefix("torch.")
    return found, {"program": "held-out loss", "seq_length": training.seq_length, "dtype": dtype, "gpus": gpus}


@torch.no_grad()
def _loss(model: Any, row: SampleRow, device: torch.device) -> tuple[float, float]:
    """Return the sum and number of the losses that count in a row; each of its parts is read alone."""
    tokens = torch.from_numpy(row.tokens).long().to(device)
    length = len(tokens) - 1
    mask = torch.ones(length) if row.loss_mask is None else torch.from_numpy(row.loss_mask)
    total, count, at = 0.0, 0.0, 0
    for part in row.lengths or [length]:
        inside, end = mask[at : at + part].to(device), at + part
        if inside.any():
            logits = model(tokens[None, at:end]).logits[0].to(device).float()
            losses = torch.nn.functional.cross_entropy(logits, tokens[at + 1 : end + 1], reduction="none")
            total, count = total + float((losses * inside).sum()), count + float(inside.sum())
        at = end
    return total, count
