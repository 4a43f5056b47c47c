"""How Megatron-LM is started and asked, and what of its code goes on record."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from signal import Signals

import pytest
import torch

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import megatron_lm
from relayrun.control.trainers.megatron_lm import MegatronSettings, MegatronTrainer
from relayrun.control.trainers.megatron_lm_log import MegatronDialect, MegatronProgram, megatron_dialect_of
from relayrun.errors import InputError
from tests.crafted import Command
from tests.history import began

TOKEN = "ghp_" + "a1B2" * 9
"""Built here: nothing in this file has the form of a token."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "run")
    began(found, 1, base=0)
    return found


def trainer(
    run: Run, *flags: str, dialect: MegatronDialect = MegatronDialect.SWISS_AI, **settings: object
) -> MegatronTrainer:
    words = ["python", "pretrain_gpt.py", *flags]
    return MegatronTrainer(
        run, MegatronSettings.of({"run": words, "dialect": dialect.value, "total_steps": 10, **settings})
    )


def begin_of(run: Run) -> AttemptStart:
    found = run.attempt(1).read_begin()
    assert found is not None
    return found


def value(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize(
    ("dialect", "flags", "signal"),
    [
        (MegatronDialect.SWISS_AI, [], "SIGUSR2"),
        (MegatronDialect.NVIDIA, [], "SIGTERM"),
        (MegatronDialect.NVIDIA, ["--exit-signal", "SIGUSR2"], "SIGUSR2"),
        (MegatronDialect.NVIDIA, ["--exit-signal", "SIGUSR2", "--exit-signal=SIGINT"], "SIGINT"),
    ],
)
def test_the_signal_to_leave_is_the_one_that_the_program_is_told(
    run: Run, dialect: MegatronDialect, flags: list[str], signal: str
) -> None:
    assert trainer(run, *flags, dialect=dialect).leave_signal is Signals[signal]


def test_an_attempt_does_not_begin_with_a_checkpoint_that_would_run_something(run: Run, tmp_path: Path) -> None:
    """Ranks unpickle by themselves; the supervisor looks before each start, also before a restart."""
    base = run.checkpoint(5)
    (base / "mp_rank_00").mkdir(parents=True)
    file = base / "mp_rank_00/model_optim_rng.pt"
    torch.save({"iteration": 5}, file)
    trainer(run).prepare(ResumePoint(iteration=5, path=str(base)), attempt=1)
    torch.save(Command(tmp_path / "was-run"), file)
    with pytest.raises(InputError, match=r"not loaded: mp_rank_00/model_optim_rng\.pt: it names posix\.mkdir"):
        trainer(run).prepare(ResumePoint(iteration=5, path=str(base)), attempt=1)
    assert not (tmp_path / "was-run").exists()


def test_the_folders_of_an_attempt(run: Run) -> None:
    words = trainer(run).command(begin_of(run))
    assert value(words, "--save") == value(words, "--load") == str(run.checkpoints)
    assert value(words, "--trigger-path") == str(run.attempt(1).client)
    assert "--trigger-path" not in trainer(run, dialect=MegatronDialect.NVIDIA).command(begin_of(run))
    assert {"--wandb-save-dir", "--tensorboard-dir"}.isdisjoint(words)


def test_wandb_gets_its_folder_and_the_one_without_which_megatron_tells_it_no_loss(run: Run) -> None:
    told = trainer(run, "--wandb-project", "p").command(begin_of(run))
    assert value(told, "--wandb-save-dir") == str(run.path)
    assert value(told, "--tensorboard-dir") == str(run.tensorboard)
    elsewhere = ("--wandb-save-dir=/elsewhere", "--tensorboard-dir=/elsewhere")
    given = trainer(run, "--wandb-project=p", *elsewhere).command(begin_of(run))
    assert {"--wandb-save-dir", "--tensorboard-dir"}.isdisjoint(given)


def test_another_runs_checkpoint_is_loaded_from_where_it_lies(run: Run, tmp_path: Path) -> None:
    begin = replace(begin_of(run), base_iteration=7, base_path=str(tmp_path / "other" / "iter_0000007"))
    words = trainer(run).command(begin)
    assert (value(words, "--load"), value(words, "--ckpt-step")) == (str(tmp_path / "other"), "7")


def test_the_trigger_folder_is_there_and_new_for_each_attempt(run: Run) -> None:
    """swiss-ai touches `exit` at the end: of one attempt it must not end the next."""
    trainer(run).prepare(BEGINNING, attempt=1)
    assert run.attempt(1).client.is_dir()
    (run.attempt(1).client / "exit").touch()
    began(run, 2, base=0)
    trainer(run).prepare(BEGINNING, attempt=2)
    assert list(run.attempt(2).client.iterdir()) == []


def test_every_attempt_is_the_same_run_of_wandb_up_to_a_rollback(run: Run) -> None:
    first = trainer(run).environment(begin_of(run))
    assert first["WANDB_RESUME"] == "allow"
    began(run, 2, base=4)
    assert trainer(run).environment(begin_of(run)) == first
    replace(begin_of(run), attempt=3, base_iteration=2, rolled_back=True).write(_folder(run, 3) / "begin.json")
    other = trainer(run).environment(begin_of(run))
    assert other["WANDB_RUN_ID"] != first["WANDB_RUN_ID"]


def _folder(run: Run, attempt: int) -> Path:
    folder = run.attempt(attempt).path
    folder.mkdir(parents=True)
    return folder


def test_a_damaged_record_of_wandbs_ids_stops_nothing(run: Run) -> None:
    run.streams.write_text("{")
    assert "WANDB_RUN_ID" not in trainer(run).environment(begin_of(run))


def test_the_checkout_comes_first_on_the_path(run: Run) -> None:
    assert trainer(run, dir="/a/checkout").environment(begin_of(run))["PYTHONPATH"] == "/a/checkout"
    assert "PYTHONPATH" not in trainer(run).environment(begin_of(run))


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)


@pytest.fixture
def cloned(tmp_path: Path) -> Path:
    folder = tmp_path / "Megatron-LM"
    folder.mkdir()
    (folder / "pretrain_gpt.py").write_text("old\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "x")
    return folder


def test_commit_and_difference_are_on_record_of_each_attempt(run: Run, cloned: Path) -> None:
    (cloned / "pretrain_gpt.py").write_text(f"new\nlogin('{TOKEN}')\n")
    trainer(run, dir=str(cloned)).prepare(ResumePoint(iteration=0, path=None), attempt=1)
    path = run.debug_of(1) / "compute_environment.txt"
    commit = subprocess.run(["git", "-C", str(cloned), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    text = path.read_text()
    assert f"commit {commit.strip()}" in text
    assert "+new" in text
    assert "<GitHub token>" in text
    assert TOKEN not in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_program_that_the_checkout_names_for_differences_is_not_run(cloned: Path, tmp_path: Path) -> None:
    program = tmp_path / "harm.sh"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/harm'\n")
    program.chmod(0o755)
    git(cloned, "config", "diff.external", str(program))
    (cloned / "pretrain_gpt.py").write_text("new\n")
    assert "+new" in megatron_lm.checkout_state(cloned)[1]
    assert not (tmp_path / "harm").exists()


def test_of_a_snapshot_what_lies_beside_it_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "0001").mkdir()
    (tmp_path / "0001.commit").write_text("abc\n")
    (tmp_path / "0001.diff").write_text("+new\n")
    assert megatron_lm.checkout_state(tmp_path / "0001") == ("abc", "+new\n")


def test_a_folder_without_git_says_so(run: Run, tmp_path: Path) -> None:
    trainer(run, dir=str(tmp_path)).prepare(BEGINNING, attempt=1)
    assert "commit unknown: this is no git checkout" in (run.debug_of(1) / "compute_environment.txt").read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[exiting program after receiving SIGUSR2.] datetime: 2026-11-22 20:40:12", "SIGUSR2"),
        ("[exiting program after 12.5 minutes] datetime: 2026-11-22 20:40:12", "after 12.5 minutes"),
        ("[exiting program at iteration 500] datetime: 2026-11-22 20:40:12", "at iteration 500"),
    ],
)
def test_how_it_says_that_it_saved_and_left(tmp_path: Path, line: str, words: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"{line}\n")
    program = MegatronProgram(
        dialect=MegatronDialect.SWISS_AI,
        logs=[(str(log), 0)],
        folder=tmp_path,
        trigger_folder=tmp_path,
        total_steps=1000,
    )
    program.steps()
    ending = program.ending(0)
    assert ending is not None
    assert (ending.outcome, ending.words) == ("left", words)


@pytest.mark.parametrize(
    ("dialect", "flags", "asked"),
    [
        (MegatronDialect.SWISS_AI, [], ["SIGUSR2"]),
        (MegatronDialect.NVIDIA, ["--profile", "--exit-signal", "SIGUSR2"], ["SIGUSR2"]),
        (MegatronDialect.SWISS_AI, ["--profile"], ["exit", "save"]),
    ],
)
def test_with_its_profiler_swiss_ai_is_asked_by_its_own_files(
    run: Run, dialect: MegatronDialect, flags: list[str], asked: list[str]
) -> None:
    """--profile switches its signal handler off."""
    triggers.create_trigger_folder(run)
    triggers.touch_trigger(run, "exit")
    signals: list[Signals] = []
    observer = trainer(run, *flags, dialect=dialect).follow(begin_of(run), signal_ranks=signals.append)
    assert observer is not None
    observer.look()
    files = sorted(path.name for path in run.attempt(1).client.glob("*"))
    assert [signal.name for signal in signals] + files == asked


@pytest.mark.parametrize(("exit_code", "left"), [(0, True), (1, False), (None, False)])
def test_it_may_have_left_by_its_own_exit_file(tmp_path: Path, exit_code: int | None, left: bool) -> None:
    program = MegatronProgram(
        dialect=MegatronDialect.SWISS_AI, logs=[], folder=tmp_path, trigger_folder=tmp_path, total_steps=1000
    )
    assert program.ending(exit_code) is None
    (tmp_path / "exit").touch()
    assert (program.ending(exit_code) is not None) is left


def test_the_dialect_is_told_by_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "megatron" / "training" / "arguments.py"
    path.parent.mkdir(parents=True)
    path.write_text("group.add_argument('--trigger-path')")
    assert megatron_dialect_of(tmp_path) is MegatronDialect.SWISS_AI
    path.write_text("group.add_argument('--exit-signal-handler')")
    assert megatron_dialect_of(tmp_path) is MegatronDialect.NVIDIA
