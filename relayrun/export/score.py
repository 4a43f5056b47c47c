"""A score of an exported folder: lm-evaluation-harness on named tasks, or the mean loss on the validation sets."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from typing import Any

import torch

from relayrun.config.schema import Evaluation
from relayrun.data.build import validation_orders
from relayrun.errors import InputError
from relayrun.export import huggingface
from relayrun.export.checkpoint_source import CheckpointSource
from relayrun.export.folder import new_folder
from relayrun.rundir.evaluations import Results


def export(checkpoint: CheckpointSource, model: Path) -> None:
    """Make the folder `model`, whole or not at all. Raises what `huggingface.write` raises."""
    with new_folder(model) as made:
        huggingface.write(checkpoint, made, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)


def run_tasks(model: Path, settings: Evaluation) -> tuple[Results, dict[str, Any]]:
    """Run lm-evaluation-harness on the named tasks. Raises InputError where it is not installed."""
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
    found = {
        task: {name.removesuffix(",none"): float(value) for name, value in metrics.items() if _is_number(value)}
        for task, metrics in answer["results"].items()
    }
    return found, {
        "program": f"lm_eval {importlib.metadata.version('lm_eval')}",
        "num_fewshot": settings.num_fewshot,
        "limit": settings.limit,
    }


def held_out(checkpoint: CheckpointSource, model: Path, settings: Evaluation) -> tuple[Results, dict[str, Any]]:
    """Return mean loss in nats per token, and its exponential, on the windows that training itself evaluates on.

    Documents are not told apart and no token is masked. Raises InputError if there is no validation set.
    """
    from transformers import AutoModelForCausalLM

    training = checkpoint.config.training
    orders = validation_orders(checkpoint.config, checkpoint.manifest)
    if not orders:
        raise InputError("there is nothing to evaluate on: neither evaluation.tasks nor a validation set", where="data")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scored: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    found: Results = {}
    for name, order in orders.items():
        windows = min(settings.limit or training.eval_steps * training.global_batch_size, order.windows_per_epoch)
        total = 0.0
        for number in range(windows):
            tokens = torch.from_numpy(order.sample(number)).long().to(device)
            with torch.no_grad():
                logits = scored(tokens[None, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, tokens[1:]))
        loss = total / windows
        found[name] = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "windows": windows}
    return found, {"program": "held-out loss", "seq_length": training.seq_length}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
