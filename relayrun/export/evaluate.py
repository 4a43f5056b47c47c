"""`python -m relayrun.export.evaluate`: the job that evaluates one checkpoint, whole or with a recorded failure.

It exports the checkpoint, lets go of it, and runs lm-evaluation-harness on the named tasks, or the mean loss on the
run's validation sets where none is named. Where another job has claimed the checkpoint it ends at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import math
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from relayrun.chain import messenger
from relayrun.config import compose
from relayrun.config.schema import Evaluation
from relayrun.data.order.build import validation_orders
from relayrun.errors import InputError, RelayrunError, run_main
from relayrun.export import huggingface
from relayrun.export.checkpoint_source import CheckpointSource, find_checkpoint
from relayrun.export.folder import new_folder
from relayrun.monitoring.trackers.wandb_evaluations import tell
from relayrun.rundir import evaluations
from relayrun.rundir.evaluations import EvaluationDir, Result
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.trainers.wandb import wandb_mode

log = logging.getLogger(__name__)

Results = dict[str, dict[str, float]]


class Ended(BaseException):
    """Raised where the scheduler ends this job."""


def evaluate(run: Run, iteration: int, attempt: int) -> Result | None:
    """Evaluate one checkpoint and record the result; None if it was another job's."""
    job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("RELAYRUN_LOCAL_JOB_ID")
    folder = evaluations.directory(run, iteration, attempt)
    if not evaluations.claim(folder, job_id, socket.gethostname()):
        return None
    started = time.time()
    about: dict[str, Any] = {"iteration": iteration, "attempt": attempt, "job_id": job_id}
    keep = False
    try:
        if (attempt, iteration) not in [(number, commit.iteration) for number, commit in evaluations.due(run)]:
            raise InputError("this checkpoint does not count any more, or is not to be evaluated", where=folder.path)
        checkpoint = find_checkpoint(run, iteration)
        settings = compose.native(compose.read_resolved(run.config_revision(run.revisions()[-1]))).evaluation
        if settings is None:
            raise InputError("this run's config has no section `evaluation`", where=run.config)
        keep = settings.keep_exported
        with new_folder(folder.model) as made:
            huggingface.write(checkpoint, made, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)
        folder.exported.touch()
        found, said = (
            run_tasks(folder.model, settings) if settings.tasks else held_out(checkpoint, folder.model, settings)
        )
        about |= {"status": "done", "results": found, "settings": said}
    except (Exception, Ended) as error:
        text = str(error) if isinstance(error, (RelayrunError, Ended)) else f"{type(error).__name__}: {error}"
        about |= {"status": "failed", "error": text}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is over; what is left takes no time
        if not keep:
            shutil.rmtree(folder.model, ignore_errors=True)
    about |= {"model": str(folder.model) if keep and folder.model.exists() else None}
    result = Result(**about, time=time.time(), seconds=time.time() - started)
    evaluations.finish(run, result)
    if run.plan.exists():
        messenger.tell(run, Plan.load(run), at_work=False)
    tell_wandb(run)
    return result


def tell_wandb(run: Run) -> None:
    """Hand the results to W&B where it is on. The evaluation stands, whatever happens here."""
    mode = wandb_mode(os.environ)
    if mode is None:
        return
    try:
        tell(run, compose.read_resolved(run.config_revision(run.revisions()[-1])), mode)
    except Exception as error:
        log.warning("W&B: %s: %s; sync_wandb.py sends what it lacks", type(error).__name__, error)


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
    llama: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    found: Results = {}
    for name, order in orders.items():
        windows = min(settings.limit or training.eval_steps * training.global_batch_size, order.windows_per_epoch)
        total = 0.0
        for number in range(windows):
            tokens = torch.from_numpy(order.sample(number)).long().to(device)
            with torch.no_grad():
                logits = llama(tokens[None, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, tokens[1:]))
        loss = total / windows
        found[name] = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "windows": windows}
    return found, {"program": "held-out loss", "seq_length": training.seq_length}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _end(number: int, _frame: FrameType | None) -> None:
    raise Ended(f"{signal.Signals(number).name}: the time limit was reached, or the job was cancelled")


def report(folder: EvaluationDir, result: Result | None) -> int:
    """Print the result of an evaluation; return the exit code."""
    if result is None:
        print(f"iteration {folder.iteration} is evaluated by another job: {folder.claim}")
        return 0
    if result.status == "failed":
        print(f"error: {result.error}", file=sys.stderr)
        return 1
    for task, metrics in result.results.items():
        print(f"iteration {result.iteration}  {task}  " + "  ".join(f"{k} {v:.6g}" for k, v in metrics.items()))
    return 0


def main() -> int:
    """Evaluate the checkpoint that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="relayrun.export.evaluate", description="Evaluate one checkpoint of a run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True, help="that committed it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    run = Run(options.run_dir.absolute())
    folder = evaluations.directory(run, options.iteration, options.attempt)
    return report(folder, evaluate(run, options.iteration, options.attempt))


if __name__ == "__main__":
    sys.exit(run_main(main))
