"""A chain whose ranks run in a container, behind a person's own lines: a stand-in apptainer, real jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayrun.config.sections.job_script import ContainerSection
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import stop_reason
from tests import stand_ins

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain

pytestmark = pytest.mark.slow


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerSection:
    monkeypatch.setenv("PATH", f"{stand_ins.write(tmp_path / 'bin')}:{os.environ['PATH']}")
    (tmp_path / "image.sif").touch()
    return ContainerSection(runtime="apptainer", image=str(tmp_path / "image.sif"), mounts=[str(tmp_path)])


def test_the_ranks_of_a_chain_run_in_the_container(
    make_run: MakeRun, container: ContainerSection, tmp_path: Path
) -> None:
    seen = 'echo "${IN_CONTAINER} ${FROM_SETUP} $RANK" >>' + f'"{tmp_path}/seen"; exec "$@"'
    run, plan = make_run(
        "--steps=4",
        total_steps=4,
        command_prefix=[*container.command, "bash", "-c", seen, "wrapper"],
        setup=["if true; then", "  export FROM_SETUP=yes", "fi"],
    )
    run_chain(run, plan)
    assert [end.cause for end in ends(run)] == ["done"], logs(run)
    assert resume_point(run).iteration == 4
    assert sorted((tmp_path / "seen").read_text().splitlines()) == [f"{tmp_path}/image.sif yes {rank}" for rank in "01"]


def test_a_line_that_fails_ends_the_chain_and_stop_names_it(make_run: MakeRun) -> None:
    run, plan = make_run(setup=["export A=1", "  grep -q x /dev/null", "export B=2"])
    run_chain(run, plan)
    assert [(end.cause, end.action) for end in ends(run)] == [("fatal", "stop")], logs(run)
    assert stop_reason(run) == "fatal: job.setup failed (exit code 1) at: grep -q x /dev/null"
    assert "job.setup failed (exit code 1) at:   grep -q x /dev/null" in logs(run)
    assert not run.attempt(1).started.exists()


@pytest.mark.long  # the next job waits for half a minute
def test_a_line_that_a_signal_ended_is_tried_again(make_run: MakeRun, tmp_path: Path) -> None:
    """Its node may have been the reason."""
    once = f'if mkdir "{tmp_path}/once"; then kill -KILL $$; fi'
    run, plan = make_run("--steps=2", total_steps=2, setup=[once])
    run_chain(run, plan)
    assert [end.cause for end in ends(run)] == ["failed", "done"], logs(run)
