"""A program of a user's own under the chain, on one machine: it knows a copy of `client.py`, or nothing of relayrun."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import pytest

from relayrun import client
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.files import read_json_lines
from tests.chain.test_local_chain import CUT, ends, logs, run_chain
from tests.waiting import wait_for

from .conftest import MakeRun

pytestmark = pytest.mark.slow  # they wait for real clocks

RANKS = """
import os, time
def agreed(iteration, mine):
    # What rank 0 says goes for all, as in any program whose ranks train together.
    said = os.path.join(os.environ["RELAYRUN_CLIENT"], f"said-{iteration}")
    if os.environ["RANK"] == "0":
        with open(said + ".new", "w") as file:
            file.write("yes" if mine else "")
        os.rename(said + ".new", said)
    while not os.path.exists(said):
        time.sleep(0.01)
    return open(said).read() == "yes"
"""

WITH_CLIENT = """
import os, sys, time
from client import checkpoint, checkpoint_done, should_leave, should_save, step_done
from ranks import agreed
folder, last = sys.argv[1], int(sys.argv[2])
start = int(open(os.path.join(checkpoint(), "state")).read()) if checkpoint() else 0
for iteration in range(start + 1, last + 1):
    time.sleep(float(sys.argv[3]))
    step_done(iteration, loss=1 / iteration, step_seconds=float(sys.argv[3]))
    leave = agreed(iteration, should_leave())
    if iteration == last or should_save() or leave:
        path = os.path.join(folder, f"step-{iteration}")
        if os.environ["RANK"] == "0":
            os.makedirs(path + ".new")
            with open(os.path.join(path + ".new", "state"), "w") as file:
                file.write(str(iteration))
            os.rename(path + ".new", path)
        checkpoint_done(iteration, path)
    if leave:
        break
"""

WITHOUT = """
import os, signal, sys, time
from ranks import agreed
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
folder, last, resume = sys.argv[1], int(sys.argv[2]), sys.argv[4:]
print("a" * 60 + "!", flush=True)  # a pattern may try for years what it finds in this
start = int(open(os.path.join(resume[1], "state")).read()) if resume else 0
for iteration in range(start + 1, last + 1):
    time.sleep(float(sys.argv[3]))
    print(f"step {iteration}: loss={1 / iteration:.4f}", flush=True)
    leave = agreed(iteration, asked)
    if os.environ["RANK"] == "0" and (iteration % 5 == 0 or iteration == last or leave):
        path = os.path.join(folder, f"ckpt_{iteration}")
        os.makedirs(path)
        with open(os.path.join(path, "state"), "w") as file:
            file.write(str(iteration))
        open(os.path.join(path, "done"), "w").close()
    if leave:
        sys.exit(143 if os.environ["RANK"] == "0" else 0)  # as many do that a signal ends
"""

DISAGREE = """
import os, sys, time
from client import checkpoint_done, should_leave, step_done
folder = sys.argv[1]
for iteration in range(1, 100_000):
    met = os.path.join(os.environ["RELAYRUN_CLIENT"], f"met-{iteration}")
    if os.environ["RANK"] == "1":
        if should_leave():
            sys.exit()  # by itself
        open(met, "w").close()
        time.sleep(0.1)
        continue
    while not os.path.exists(met):  # as in a collective
        time.sleep(0.01)
    step_done(iteration)
    if iteration == 5:
        os.makedirs(os.path.join(folder, "step-5"))
        checkpoint_done(5, os.path.join(folder, "step-5"))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    shutil.copy(client.__file__, tmp_path / "client.py")
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "with_client.py").write_text(WITH_CLIENT)
    (tmp_path / "without.py").write_text(WITHOUT)
    (tmp_path / "disagree.py").write_text(DISAGREE)
    return tmp_path


def told(program: Path, *arguments: str) -> dict[str, object]:
    """The settings of a program that says everything through the client."""
    return {"run": [sys.executable, str(program / "with_client.py"), "{checkpoints}", *arguments], "leave_signal": None}


def seen(program: Path, *arguments: str) -> dict[str, object]:
    """The settings of a program that is seen by its log and its files, and hears SIGTERM."""
    return {
        "run": [sys.executable, str(program / "without.py"), "{checkpoints}", *arguments],
        "resume": ["--resume", "{checkpoint}"],
        "checkpoint": {"pattern": "ckpt_{iteration}", "whole_when": "done"},
        "progress": r"step (?P<iteration>\d+): loss=(?P<loss>\S+)|(a+)+$",
        "leave_signal": "SIGTERM",
    }


def iterations(run: Run) -> list[int]:
    return [line["iteration"] for line in read_json_lines(run.metrics_view)]


@pytest.mark.long
@pytest.mark.parametrize("settings", [told, seen])
def test_it_goes_through_as_many_jobs_as_its_time_limit_asks_for(
    make_run: MakeRun, program: Path, settings: object
) -> None:
    run, plan = make_run(
        total_steps=None,
        trainer="command",
        trainer_settings=settings(program, "40", "0.35"),
        **CUT,  # type: ignore[operator]
    )
    run_chain(run, plan)
    records = ends(run)
    assert len(records) >= 2, logs(run)
    assert [record.cause for record in records] == ["saved"] * (len(records) - 1) + ["done"], logs(run)
    why = records[0].reason.partition(";")[0]  # and, on a busy machine, that the limit is short
    assert why in ("time limit near", "SIGUSR2"), why  # who looks first, the chain or the batch system
    assert "the program ended by itself" in run.stop.read_text()
    assert resume_point(run).iteration == 40
    assert iterations(run) == list(range(1, 41))


def test_a_program_that_is_killed_goes_on_from_its_newest_whole_checkpoint(make_run: MakeRun, program: Path) -> None:
    settings = seen(program, "20", "0.1")
    run, plan = make_run(total_steps=20, trainer="command", trainer_settings=settings)
    text = (program / "without.py").read_text()
    torn = 'if iteration == 12 and not resume: os.makedirs(os.path.join(folder, "ckpt_12")); os._exit(9)'
    (program / "without.py").write_text(text.replace("    if leave:\n", f"    {torn}\n    if leave:\n"))
    run_chain(run, plan)
    assert [record.cause for record in ends(run)] == ["failed", "done"], logs(run)
    assert ends(run)[0].durable_iteration == 10
    assert run.attempt(2).read_begin().base_iteration == 10  # type: ignore[union-attr]
    assert iterations(run) == list(range(1, 21))
    assert list((run.checkpoints / ".quarantine").iterdir()) == [run.checkpoints / ".quarantine" / "ckpt_12-0002"]


def test_triggers_save_and_exit(make_run: MakeRun, program: Path) -> None:
    run, plan = make_run(total_steps=None, trainer="command", trainer_settings=told(program, "1000", "0.1"))
    chain = threading.Thread(target=run_chain, args=(run, plan))
    chain.start()
    wait_for(lambda: run.attempt_numbers() and run.attempt(1).metrics.exists())
    triggers.touch_trigger(run, "save")
    wait_for(lambda: (run.triggers / "save.done").exists())
    saved = resume_point(run).iteration
    assert saved > 0
    triggers.touch_trigger(run, "exit")
    chain.join(300)
    assert [record.cause for record in ends(run)] == ["exit"], logs(run)
    assert "exit trigger by" in run.stop.read_text()
    assert resume_point(run).iteration > saved
    assert (run.triggers / "exit.done").exists()


def test_a_program_that_stands_still_is_ended(make_run: MakeRun, program: Path) -> None:
    settings = told(program, "20", "0.1")
    text = (program / "with_client.py").read_text()
    (program / "with_client.py").write_text(
        text.replace("    leave =", "    time.sleep(1000 * (iteration == 5))\n    leave =")
    )
    run, plan = make_run(
        total_steps=None, trainer="command", trainer_settings=settings, hang_timeout=3, max_failed_attempts=1
    )
    run_chain(run, plan)
    (end,) = ends(run)
    assert end.cause == "hang", logs(run)
    assert "no progress" in end.reason
    assert "answer" not in end.reason


@pytest.mark.long
def test_ranks_that_disagree_when_to_leave_are_ended_and_what_is_saved_counts(make_run: MakeRun, program: Path) -> None:
    settings = {"run": [sys.executable, str(program / "disagree.py"), "{checkpoints}"], "leave_signal": None}
    run, plan = make_run(total_steps=None, trainer="command", trainer_settings=settings, hang_timeout=3)
    chain = threading.Thread(target=run_chain, args=(run, plan))
    chain.start()
    wait_for(lambda: run.attempt_numbers() and list(read_json_lines(run.attempt(1).commits)))
    triggers.touch_trigger(run, "exit")
    chain.join(300)
    (end,) = ends(run)
    assert (end.cause, end.durable_iteration) == ("hang", 5), logs(run)
    assert (stop_reason(run) or "").startswith("exit trigger by ")


SCRATCH = """
import os, sys, time
folder = sys.argv[1]
for iteration in range(1, 100_000):
    time.sleep(0.2)
    print(f"step {iteration}: loss=1", flush=True)
    if iteration == 8:
        path = os.path.join(folder, "step-00000008.pt")
        with open(path + ".new", "w") as file:
            file.write("weights")
        os.rename(path + ".new", path)
    if iteration == 16:
        sys.exit(1)
"""


def test_a_program_that_does_not_go_on_ends_the_chain_before_it_writes_over_its_files(
    make_run: MakeRun, program: Path
) -> None:
    (program / "scratch.py").write_text(SCRATCH)
    settings = {
        "run": [sys.executable, str(program / "scratch.py"), "{checkpoints}"],
        "checkpoint": {"pattern": "step-{iteration}.pt"},
        "progress": r"step (?P<iteration>\d+): loss=(?P<loss>\S+)",
        "leave_signal": None,
    }
    run, plan = make_run(total_steps=None, trainer="command", trainer_settings=settings, ntasks_per_node=1)
    run_chain(run, plan)
    assert [record.cause for record in ends(run)] == ["failed", "fatal"], logs(run)
    assert "says iteration 1 first, and was to go on from iteration 8" in run.stop.read_text()
    assert resume_point(run).iteration == 8
    assert run.attempt(2).read_commits() == []
