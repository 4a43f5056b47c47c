"""Commands of the user's own in an evaluation job: one makes a folder of transformers, one scores it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.rundir.evaluations import EvaluationDir, EvaluationScores
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError

COMMAND_END_SECONDS = 10.0
"""Seconds that a command has to end where the job ends."""


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
        """Return a folder of transformers of the checkpoint: itself, where no command makes one.

        Raises InputError if the command fails, or has made no such folder.
        """
        words, model = self._settings.convert, self._folder.model
        if not words:
            model = self._checkpoint
        else:
            _run_command(_filled(words, self._names | {"model": str(model)}), setting="evaluation.convert")
        if not (model / "config.json").is_file():
            raise InputError(
                "this is no folder of transformers: it has no config.json",
                where=model,
                hint="set evaluation.convert to a program that makes one of a checkpoint"
                if not words
                else "let evaluation.convert write into {model} itself",
            )
        return model

    def score(self, model: Path) -> tuple[EvaluationScores, dict[str, Any]]:
        """Return what the command scores, and what it was. Raises InputError if it fails, or has written no numbers."""
        words = self._settings.command
        self._folder.scores.unlink(missing_ok=True)
        _run_command(_filled(words, self._names | {"model": str(model)}), setting="evaluation.command")
        found = read_scores(self._folder.scores)
        program = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
        return found, {"program": Path(program).name, "command": words}


def read_scores(path: Path) -> EvaluationScores:
    """Return the numbers of a JSON object: {task: {metric: number}}, {metric: number}, or what lm_eval writes.

    Raises InputError if there is no such file, or it holds no numbers.
    """
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
    flat = {name: value for name, value in said.items() if _is_number(value)}
    tasks = {name: value for name, value in said.items() if isinstance(value, dict)}
    if flat:
        tasks["command"] = tasks.get("command", {}) | flat
    found = {
        task: {name.removesuffix(",none"): float(value) for name, value in metrics.items() if _is_number(value)}
        for task, metrics in tasks.items()
    }
    found = {task: metrics for task, metrics in found.items() if metrics}
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
    try:
        program = subprocess.Popen(words, stdin=subprocess.DEVNULL, process_group=0)
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
    """End what is left of a command and of all that it started."""
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


def _filled(words: Sequence[str], names: Mapping[str, str]) -> list[str]:
    return [re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), word) for word in words]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
