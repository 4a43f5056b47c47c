"""Orders and questions that Slurm does not answer: repeated, refused, hanging, or queued in spite of an error."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import factory, slurm_commands
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import SchedulerError
from tests.control.slurm_doubles import LINE, PLAN, fake_command, slurm_of


def test_an_unreachable_controller_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    fake_command(
        tmp_path,
        "scontrol",
        f"echo x >> {count}; [ $(wc -l < {count}) -lt 3 ] && "
        f'{{ echo "Unable to contact slurm controller (connect failure)" >&2; exit 1; }}; echo "{LINE}"',
    )
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    job = Slurm(patience=2, pause=0.01).query("17")
    assert job is not None
    assert job.id == "17"
    assert count.read_text().count("x") == 3


def test_a_refusal_is_not_repeated_and_says_what_slurm_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(tmp_path, "sbatch", f'echo x >> {tmp_path}/count; echo "invalid partition specified" >&2; exit 1')
    fake_command(tmp_path, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/bin")
    with pytest.raises(SchedulerError, match="sbatch: invalid partition specified"):
        Slurm(patience=2, pause=0.01).test(Path("job"))
    assert (tmp_path / "count").read_text().count("x") == 1
    assert Slurm(patience=2, pause=0.01).query("1") is None


def test_missing_slurm_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="sbatch is not installed here"):
        Slurm().test(Path("job"))


def test_whatever_a_question_meets_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    script = (
        f"echo x >> {count}; [ $(wc -l < {count}) -lt 3 ] && "
        f'{{ echo "slurm_load_jobs error: Some new words" >&2; exit 1; }}; echo "{LINE}"'
    )
    job = slurm_of(tmp_path, monkeypatch, scontrol=script).query("17")
    assert job is not None
    assert count.read_text().count("x") == 3


def test_a_command_that_hangs_is_ended_and_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tmp_path / "once"
    monkeypatch.setattr("relayrun.control.scheduler.slurm_commands.COMMAND_SECONDS", 3.0)
    script = f'if [ ! -e {once} ]; then touch {once}; exec sleep 100; fi; echo "{LINE}"'
    assert slurm_of(tmp_path, monkeypatch, scontrol=script).query("17") is not None


@pytest.mark.parametrize("words", ["Protocol authentication error", "Socket timed out on send/recv operation"])
def test_a_job_that_was_queued_in_spite_of_an_error_is_found(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = tmp_path / "queue"
    slurm = slurm_of(
        tmp_path,
        monkeypatch,
        sbatch=f'for word; do case "$word" in --comment=*) echo "7|${{word#--comment=}}" >> {queue};; esac; done; '
        f'echo "sbatch: error: {words}" >&2; exit 1',
        squeue=f"[ ! -e {queue} ] || cat {queue}",
    )
    plan = Plan.of(PLAN)
    assert slurm.submit(plan, Path("job"), options={}) == "7"
    assert len(queue.read_text().splitlines()) == 1
    assert slurm.submit_auxiliary(plan, Path("job"), name="e", arguments=[], limit=60) == "7"
    assert len(queue.read_text().splitlines()) == 2


def test_an_answer_of_sbatch_without_a_job_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, sbatch="echo hello", squeue="true")
    with pytest.raises(SchedulerError, match="no job id in its answer 'hello'"):
        slurm.submit(Plan.of(PLAN), Path("job"), options={})


def test_another_job_that_is_completing_is_asked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, line = tmp_path / "count", LINE.replace("JobState=RUNNING", "JobState=$state")
    states = f"echo x >> {count}; state=COMPLETING; [ $(wc -l < {count}) -lt 4 ] || state=CANCELLED"
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm_of(tmp_path, monkeypatch, scontrol=f'{states}; echo "{line}"').cancelled("17", nodes="n[0-1]")
    assert [seconds for seconds in slept if seconds >= 1] == [1, 1, 1]  # `subprocess` sleeps as well


@pytest.mark.parametrize(
    "state", ["RESV_DEL_HOLD", "REQUEUE_HOLD", "SPECIAL_EXIT", "EXPEDITING", "STAGE_OUT", "PENDING"]
)
def test_a_job_in_whatever_state_is_cancelled_unless_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    gone = tmp_path / "gone"
    line = LINE.replace("JobState=RUNNING", f"JobState={state}")
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{line}"', scancel=f"echo $1 > {gone}")
    slurm.cancel("17")
    assert gone.read_text() == "17\n"
    gone.unlink()
    for ended in ("CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED"):
        slurm = slurm_of(tmp_path, monkeypatch, scontrol=f'echo "{line.replace(state, ended)}"')
        slurm.cancel("17")
    assert not gone.exists()


def test_several_jobs_are_cancelled_by_one_order_or_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    assert slurm_of(tmp_path, monkeypatch, scancel=f'echo "$@" >> {asked}').cancel_together(["17", "18"])
    assert asked.read_text() == "17 18\n"
    refuses = "echo 'scancel: error: Kill job error on job id 18: Invalid job id specified' >&2; exit 1"
    assert not slurm_of(tmp_path, monkeypatch, scancel=refuses).cancel_together(["17", "18"])


def slow_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Slurm's commands, each of which takes so long."""
    answers = {"squeue": "", "sbatch": "17\n", "scontrol": ""}
    for name, answer in answers.items():
        (folder / name).write_text(f"#!/bin/sh\nsleep {seconds}\nprintf '{answer}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_commands, "SILENCE_SECONDS", 0.1)


def test_a_person_waits_for_an_order_as_long_as_a_job_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a controller that takes 30 s, cancel and submit gave up after 10 and 20 s."""
    slow_commands(tmp_path, monkeypatch, seconds=0.5)
    limits: list[float] = []
    run = slurm_commands.run_slurm_command

    def recorded(*arguments: Any, seconds: float, **options: Any) -> str:
        limits.append(seconds)
        return run(*arguments, seconds=seconds, **options)

    monkeypatch.setattr(slurm_commands, "run_slurm_command", recorded)
    caplog.set_level("INFO", "relayrun")
    person = factory.slurm_scheduler(patience=5.0, ordered=True)
    assert person.submit_once(["script"], name="j") == "17"
    assert person.jobs_named("j") == []
    assert limits == [slurm_commands.COMMAND_SECONDS] * 2
    assert "sbatch has not answered for 0 s; waiting up to 120 s" in caplog.text
    assert "squeue has not answered" in caplog.text
    caplog.clear()
    factory.slurm_scheduler(patience=5.0).jobs_named("j")  # a question of `status`
    assert limits[2:] == [10.0]
    assert not caplog.text


def test_an_sbatch_without_an_answer_says_that_the_job_may_be_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_commands(tmp_path, monkeypatch, seconds=600)
    monkeypatch.setattr(slurm_commands, "COMMAND_SECONDS", 0.2)
    with pytest.raises(slurm_commands.TimedOutError, match="whether it has queued the job is unknown") as found:
        Slurm(patience=0.0, ordered=True).submit_once(["script"], name="j-1")
    assert found.value.hint is not None
    assert "squeue --me --name=j-1" in found.value.hint
