"""`python -m relayrun.train.export.evaluate`: the job that evaluates one checkpoint, or records why it failed.

It exports the checkpoint, releases it, and runs lm-evaluation-harness on the named tasks, a user's command, or, without
both, the mean loss on the run's validation sets. A command converts a checkpoint of another trainer. Meanwhile a second
process is refused; after a kill the next one goes on with what was exported. torch is imported late: foreign programs
may run without it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommonConfig, EvaluationSection, RunConfig
from relayrun.control.chain import background, campaign
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import EvaluationClaim, EvaluationDir, EvaluationResult, EvaluationScores
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import die_with_parent
from relayrun.control.trainers.command import fill_placeholders
from relayrun.control.trainers.tools import wandb_mode
from relayrun.errors import ENDING_SIGNALS, InputError, Interrupted, RelayrunError, run_command
from relayrun.leftovers import remove_leftovers
from relayrun.publishing import output_lock
from relayrun.train.reporting.trackers import send_evaluations

COMMAND_END_SECONDS = 10.0
"""Seconds that a command has to end if the job ends."""


class EvaluationCommands:
    """The commands of the section `evaluation` for one checkpoint."""

    def __init__(self, run: Run, config: CommonConfig, folder: EvaluationDir, checkpoint: Path) -> None:
        assert config.evaluation is not None
        self._settings = config.evaluation
        self._folder = folder
        self._checkpoint = checkpoint
        self._names = {
            "checkpoint": str(checkpoint),
            "iteration": str(folder.iteration),
            "checkpoints": str(run.checkpoints),
            "run_dir": str(run.path),
            "results": str(folder.scores),
            "python": config.cluster.python or sys.executable,
        }

    def convert(self) -> Path:
        """Return a folder of transformers of the checkpoint: itself without a command. Raises InputError if the command
        fails, or makes no such folder."""
        words, model = self._settings.convert, self._folder.model
        hint = "let evaluation.convert write into {model} itself"
        if words:
            self._run(words, model, setting="evaluation.convert")
        else:
            model = self._checkpoint
            hint = "set evaluation.convert to a program that makes one of a checkpoint"
        if not (model / "config.json").is_file():
            raise InputError("this is no folder of transformers: it has no config.json", where=model, hint=hint)
        return model

    def score(self, model: Path) -> tuple[EvaluationScores, dict[str, Any]]:
        """Return the scores of the command, and its description. Raises InputError if it fails or writes no numbers."""
        words = self._settings.command
        self._folder.scores.unlink(missing_ok=True)
        self._run(words, model, setting="evaluation.command")
        found = read_scores(self._folder.scores)
        program = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
        return found, {"program": Path(program).name, "command": words}

    def _run(self, words: Sequence[str], model: Path, *, setting: str) -> None:
        names = self._names | {"model": str(model)}
        _run_command([fill_placeholders(word, names) for word in words], setting=setting)


def read_scores(path: Path) -> EvaluationScores:
    """Return the numbers of a JSON object: {task: {metric: number}}, {metric: number}, or an output of lm_eval. Raises
    InputError if the file is missing or holds no numbers."""
    hint = 'write {"task": {"metric": 0.5}} to {results}'
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("evaluation.command has not written its results", where=path, hint=hint) from None
    except ValueError as error:
        raise InputError(f"the results of evaluation.command are no JSON: {error}", where=path, hint=hint) from None
    if isinstance(said, dict) and isinstance(said.get("results"), dict):
        said = said["results"]
    if not isinstance(said, dict):
        raise InputError("the results of evaluation.command are no JSON object", where=path, hint=hint)
    tasks = {name: value for name, value in said.items() if isinstance(value, dict)}
    flat = {name: value for name, value in said.items() if name not in tasks}
    tasks["command"] = tasks.get("command", {}) | flat
    found = {task: metrics for task, metrics in evaluations.numeric_scores(tasks).items() if metrics}
    if not found:
        raise InputError("the results of evaluation.command hold no numbers", where=path, hint=hint)
    for task, metrics in found.items():
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise InputError(f"{task}: {name} is {value}, which is no score", where=path)
    return found


def _run_command(words: Sequence[str], *, setting: str) -> None:
    """Run a command to its end, in a process group that ends with this program. Raises InputError if it fails."""
    print(f"{setting}: {shlex.join(words)}", flush=True)
    die = partial(die_with_parent, signal.SIGKILL)
    try:
        program = subprocess.Popen(words, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die)
    except OSError as error:
        raise InputError(f"{words[0]} cannot be started: {error.strerror}", where=setting) from None
    try:
        code = program.wait()
    finally:
        _end_command(program)
    if code:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        raise InputError(f"{Path(words[0]).name} ended with {how}", where=setting, hint="the job's log says more")


def _end_command(program: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(program.pid, number)
        except ProcessLookupError:
            return
        if program.poll() is not None:
            continue
        try:
            program.wait(COMMAND_END_SECONDS)
        except subprocess.TimeoutExpired:
            continue


log = logging.getLogger(__name__)


def evaluate_checkpoint(run: Run, iteration: int, attempt: int, *, in_job: bool = False) -> EvaluationResult:
    """Evaluate one checkpoint, unless it has a result; record the result and return it. `in_job`: the end of the job is
    a result, too. Raises InputError if another process evaluates the checkpoint."""
    folder = evaluations.evaluation_dir(run, iteration, attempt)
    with output_lock(folder.result, lambda: "no result is on record; the same command goes on"):
        remove_leftovers(run.path)
        result = EvaluationResult.read(folder.result)
        if result is None:
            result = _evaluated(run, folder, in_job=in_job)
            result.write(folder.result)
        evaluations.write_evaluations_view(run)
        if result.model is None:
            shutil.rmtree(folder.model, ignore_errors=True)
    if run.plan.exists():
        background.send_notices(run, Plan.load_in_job(run), at_work=False)
        campaign.start_due_members_of(run)  # a run may have waited for this result
    report_to_wandb(run)
    return result


def _evaluated(run: Run, folder: EvaluationDir, *, in_job: bool) -> EvaluationResult:
    """Evaluate one checkpoint; an error is a result, too."""
    started = time.time()
    job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("RELAYRUN_LOCAL_JOB_ID")
    EvaluationClaim(job_id=job_id, node=socket.gethostname(), time=started).write(folder.claim)
    about: dict[str, Any] = {"iteration": folder.iteration, "attempt": folder.attempt, "job_id": job_id}
    keep = False
    try:
        due = {(number, commit.iteration): commit for number, commit in evaluations.due_checkpoints(run)}
        commit = due.get((folder.attempt, folder.iteration))
        if commit is None:
            raise InputError("this checkpoint does not count any more, or is not to be evaluated", where=folder.path)
        config = resolve.read_resolved_config(run.config_revision(run.revisions()[-1]))
        settings = config.evaluation
        if settings is None:
            raise InputError("this run's config has no section `evaluation`", where=run.config)
        keep = settings.keep_exported
        found, said = _scored(run, config, settings, folder, Path(commit.path))
        about |= {"status": "done", "results": found, "settings": said}
    except (Exception, Interrupted) as error:
        if isinstance(error, Interrupted) and not in_job:  # by a person, perhaps in another allocation
            raise
        text = str(error) if isinstance(error, RelayrunError) else f"{type(error).__name__}: {error}"
        if isinstance(error, Interrupted):
            text = f"{error}: the time limit was reached, or the job was cancelled"
        about |= {"status": "failed", "error": text}
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the rest takes no time
    about |= {"model": str(folder.model) if keep and folder.model.exists() else None}
    return EvaluationResult(**about, time=time.time(), seconds=time.time() - started)


def _scored(
    run: Run, config: CommonConfig, settings: EvaluationSection, folder: EvaluationDir, checkpoint: Path
) -> tuple[EvaluationScores, dict[str, Any]]:
    """Make a folder of transformers; return its scores and their description."""
    own, source = EvaluationCommands(run, config, folder, checkpoint), None
    exported = folder.exported.exists() and folder.model.exists()  # by a process that was killed
    if not exported:
        shutil.rmtree(folder.model, ignore_errors=True)
    if isinstance(config, RunConfig):
        from relayrun.train.export import scores
        from relayrun.train.export.source_and_target import find_checkpoint

        source, model = find_checkpoint(run, folder.iteration, whole=not exported), folder.model
        if not exported:
            scores.export_model(source, model)
    else:
        model = folder.model if exported else own.convert()
    if model != checkpoint:  # else the checkpoint is needed to the end
        folder.exported.touch()
    if settings.command:
        return own.score(model)
    from relayrun.train.export import scores

    gpus = scores.visible_gpus(settings, config.job.gpus_per_node)
    if source is not None and not settings.tasks:
        return scores.held_out_loss(source, model, settings, gpus=gpus)
    return scores.run_tasks(source, model, settings, gpus=gpus)


def report_to_wandb(run: Run) -> None:
    """Send the results to W&B if it is on. A failure does not affect the evaluation."""
    mode = wandb_mode(os.environ)
    if mode is None:
        return
    try:
        send_evaluations(run, resolve.read_resolved_config(run.config_revision(run.revisions()[-1])), mode)
    except Exception as error:
        log.warning("W&B: %s: %s; sync_wandb.py sends what it lacks", type(error).__name__, error)


def print_result(result: EvaluationResult) -> int:
    """Print the result of an evaluation; return the exit code."""
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
    parser.add_argument("--in-job", action="store_true", help="the run's own: its end is a result")
    options = parser.parse_args()
    run = Run(options.run_dir.absolute())
    return print_result(evaluate_checkpoint(run, options.iteration, options.attempt, in_job=options.in_job))


if __name__ == "__main__":
    sys.exit(run_command(main))
