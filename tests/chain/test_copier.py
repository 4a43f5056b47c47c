"""The process that copies checkpoints beside the ranks: when it begins, and that it ends with the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.control.chain.background import PassAfterSave, copy_checkpoints
from relayrun.control.rundir.mirror import MirrorPolicy
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.submit import policies, submission
from tests.waiting import wait_for
from tests.workspace import Workspace

from .conftest import MakeRun

PROGRAM = "import os, sys, time; open(sys.argv[1] + '/ran', 'a').write(str(os.nice(0)) + '\\n'); time.sleep({})"


def asked(run: Run, program: str) -> None:
    run.mirror.mkdir(exist_ok=True)
    MirrorPolicy(folder="/nowhere", id="1", keep_last=1, program=[sys.executable, "-c", program]).write(
        run.mirror_policy
    )


def ran(run: Run) -> list[str]:
    path = run.path / "ran"
    return path.read_text().splitlines() if path.exists() else []


def test_a_pass_begins_with_each_save_and_never_beside_another(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run()
    asked(run, PROGRAM.format(0))
    made = PassAfterSave(copy_checkpoints, run, plan)
    made.look(0)
    wait_for(lambda: over(made))
    made.look(0)  # nothing was saved meanwhile
    assert ran(run) == ["19"]
    asked(run, PROGRAM.format(1000))
    made.look(100)
    wait_for(lambda: len(ran(run)) == 2)
    process = made._process
    made.look(200)  # one is under way
    assert made._process is process
    made.finish()
    asked(run, PROGRAM.format(0))
    made.look(200)
    wait_for(lambda: over(made))
    monkeypatch.setattr(made, "_next", 0.0)
    made.look(200)  # what failed may work now
    wait_for(lambda: over(made))
    assert ran(run) == ["19"] * 4


def over(made: PassAfterSave) -> bool:
    """Whether the process that it has started last has ended."""
    return made._process is not None and made._process.poll() is not None


def test_a_pass_ends_with_the_job(make_run: MakeRun) -> None:
    run, plan = make_run()
    asked(run, PROGRAM.format(1000))
    made = PassAfterSave(copy_checkpoints, run, plan)
    made.look(1)
    wait_for(lambda: ran(run) == ["19"])
    made.finish()
    assert made._process is not None
    assert made._process.poll() is not None


def test_without_a_second_place_nothing_begins(make_run: MakeRun) -> None:
    run, plan = make_run()
    made = PassAfterSave(copy_checkpoints, run, plan)
    made.look(1)
    assert made._process is None
    made.finish()


def test_a_submit_says_where_copies_go_and_keeps_their_name(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    (tmp_path / "second").mkdir()
    place = {"path": str(tmp_path / "second"), "keep_every": 50}
    plan = submission.submit_run(resolve.load_run_config(workspace.config("run", checkpoint={"mirror": place})))
    policy = MirrorPolicy.read(plan.run.mirror_policy)
    assert policy is not None
    assert policy.folder == f"{tmp_path}/second/tests/tiny"
    assert (policy.keep_last, policy.keep_every) == (2, 50)
    policies.write_mirror_policy(
        resolve.load_run_config(workspace.config("run", checkpoint={"mirror": place})), plan.run
    )
    assert MirrorPolicy.read(plan.run.mirror_policy) == policy
    policies.write_mirror_policy(resolve.load_run_config(workspace.config("run")), plan.run)
    assert MirrorPolicy.read(plan.run.mirror_policy) is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("archive/ada", "is relative; write the absolute path of a folder"),
        ("s3://bucket/ada", "s3://bucket/ada is a URL, and only folders of this machine are written to"),
    ],
)
def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, path: str, words: str) -> None:
    workspace = Workspace.make(tmp_path)
    with pytest.raises(ConfigError, match=words):
        resolve.load_run_config(workspace.config("run", checkpoint={"mirror": {"path": path}}))


def test_a_place_that_is_not_there_or_in_the_run_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    (tmp_path / "run/inside").mkdir(parents=True)
    for path, words in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path / "run/inside", "lost with it")):
        with pytest.raises(Exception, match=words) as error:
            submission.submit_run(
                resolve.load_run_config(workspace.config("run", checkpoint={"mirror": {"path": str(path)}}))
            )
        assert "checkpoint.mirror.path" in str(error.value)
    assert not (tmp_path / "run/plan.json").exists()
