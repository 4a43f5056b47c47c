"""`python -m relayrun.train.export.evaluate`: the job that evaluates one checkpoint, whole or with a recorded failure.

It exports the checkpoint, lets go of it, and runs lm-evaluation-harness on the named tasks or a command of the user's
own, or the mean loss on the run's validation sets where neither is named. A checkpoint of another trainer is converted
by a command. Where another job has claimed the checkpoint it ends at once. torch is imported only where it is needed:
a program of somebody else's may run in a Python without it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from relayrun.config.compose import compose
from relayrun.config.compose.schema import CommonConfig, EvaluationSection, RunConfig
from relayrun.control.chain import campaign, messenger
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import EvaluationDir, EvaluationResult, EvaluationScores
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.wandb import wandb_mode
from relayrun.errors import InputError, RelayrunError, run_main
from relayrun.train.export.own_commands import EvaluationCommands
from relayrun.train.reporting.wandb_evaluations import send_evaluations

log = logging.getLogger(__name__)


class EndedByScheduler(BaseException):
    """Raised where the scheduler ends this job."""


def evaluate_checkpoint(run: Run, iteration: int, attempt: int) -> EvaluationResult | None:
    """Evaluate one checkpoint and record the result; None if it was another job's."""
    job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("RELAYRUN_LOCAL_JOB_ID")
    folder = evaluations.evaluation_dir(run, iteration, attempt)
    if not evaluations.claim_evaluation(folder, job_id, socket.gethostname()):
        return None
    started = time.time()
    about: dict[str, Any] = {"iteration": iteration, "attempt": attempt, "job_id": job_id}
    keep = False
    try:
        due = {(number, commit.iteration): commit for number, commit in evaluations.due_checkpoints(run)}
        commit = due.get((attempt, iteration))
        if commit is None:
            raise InputError("this checkpoint does not count any more, or is not to be evaluated", where=folder.path)
        config = compose.read_resolved_config(run.config_revision(run.revisions()[-1]))
        settings = config.evaluation
        if settings is None:
            raise InputError("this run's config has no section `evaluation`", where=run.config)
        keep = settings.keep_exported
        found, said = _scored(run, config, settings, folder, Path(commit.path))
        about |= {"status": "done", "results": found, "settings": said}
    except (Exception, EndedByScheduler) as error:
        text = (
            str(error) if isinstance(error, (RelayrunError, EndedByScheduler)) else f"{type(error).__name__}: {error}"
        )
        about |= {"status": "failed", "error": text}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is over; what is left takes no time
        if not keep:
            shutil.rmtree(folder.model, ignore_errors=True)
    about |= {"model": str(folder.model) if keep and folder.model.exists() else None}
    result = EvaluationResult(**about, time=time.time(), seconds=time.time() - started)
    evaluations.record_result(run, result)
    if run.plan.exists():
        messenger.send_notices(run, Plan.load(run), at_work=False)
        campaign.start_due_members_of(run)  # a run may have waited for this result
    report_to_wandb(run)
    return result


def _scored(
    run: Run, config: CommonConfig, settings: EvaluationSection, folder: EvaluationDir, checkpoint: Path
) -> tuple[EvaluationScores, dict[str, Any]]:
    """Make a folder of transformers, and its score."""
    own = EvaluationCommands(run, config, folder, checkpoint)
    if isinstance(config, RunConfig):
        from relayrun.train.export import scores
        from relayrun.train.export.checkpoint_source import find_checkpoint

        source, model = find_checkpoint(run, folder.iteration), folder.model
        scores.export_model(source, model)
        if not settings.tasks and not settings.command:
            folder.exported.touch()
            return scores.held_out_loss(source, model, settings)
    else:
        model = own.convert()
    if model != checkpoint:  # otherwise it is needed to the end
        folder.exported.touch()
    if settings.command:
        return own.score(model)
    from relayrun.train.export import scores

    return scores.run_tasks(model, settings)


def report_to_wandb(run: Run) -> None:
    """Hand the results to W&B where it is on. The evaluation stands, whatever happens here."""
    mode = wandb_mode(os.environ)
    if mode is None:
        return
    try:
        send_evaluations(run, compose.read_resolved_config(run.config_revision(run.revisions()[-1])), mode)
    except Exception as error:
        log.warning("W&B: %s: %s; sync_wandb.py sends what it lacks", type(error).__name__, error)


def _leave_on_signal(number: int, _frame: FrameType | None) -> None:
    raise EndedByScheduler(f"{signal.Signals(number).name}: the time limit was reached, or the job was cancelled")


def print_result(folder: EvaluationDir, result: EvaluationResult | None) -> int:
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
    parser = argparse.ArgumentParser(
        prog="relayrun.train.export.evaluate", description="Evaluate one checkpoint of a run."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True, help="that committed it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave_on_signal)
    run = Run(options.run_dir.absolute())
    folder = evaluations.evaluation_dir(run, options.iteration, options.attempt)
    return print_result(folder, evaluate_checkpoint(run, options.iteration, options.attempt))


if __name__ == "__main__":
    sys.exit(run_main(main))
