"""Two people of a group and an outsider share a run directory, on a cluster with accounting.

Jobs need accounts, so there are three for the time of these tests, and a group. What they run lies where they may
read it: the interpreter and its packages, mounted a second time, and a checkout that the group shares.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.files import read_json_lines
from tests.watchers import end_watcher, start_watcher
from tests.workspace import Workspace, ends, steps

from .cluster import ROOT, TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

UMASK = "0002"
MOUNTS = {"python": Path(sys.base_prefix), "packages": Path(sysconfig.get_path("purelib"))}
UNDO = r"""
for name in python packages; do umount --lazy "$1/$name"; done
for try in {1..30}; do  # the users have processes as long as the cluster ends
  for user in "${@:3}"; do userdel "${user}"; done
  ! getent passwd "${@:3}" >/dev/null || { sleep 2; continue; }
  groupdel "$2" && exit
done
"""
"""What a killed run leaves; the folder itself stays, as a mount in it may."""


@dataclass(frozen=True)
class Team:
    """A cluster, a folder that all three may pass through, and the names of the people."""

    cluster: TestCluster
    folder: Path
    group: str
    owner: str
    member: str
    outsider: str
    workspace: Workspace

    @property
    def python(self) -> str:
        """The interpreter, by a path that everybody may pass."""
        return str(self.folder / "python" / Path(os.path.realpath(sys.executable)).relative_to(MOUNTS["python"]))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder),
            "PYTHONPATH": f"{self.folder / 'code'}:{self.folder / 'packages'}",
            "LD_LIBRARY_PATH": str(self.folder / "python/lib"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def act(
        self, person: str, *argv: str | Path, check: bool = True, umask: str = UMASK
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as that person."""
        ids = ["setpriv", f"--reuid={person}", f"--regid={person}", "--init-groups"]
        shell = ["bash", "-c", f'umask {umask}; exec "$@"', "bash"]
        return self.cluster.run([*ids, *shell, *argv], check=check, env=self.environment, cwd=self.folder)

    def relayrun(self, person: str, *argv: str | Path, check: bool = True, umask: str = UMASK) -> str:
        """The `relayrun` command as that person; what it printed. With `check=False` it must fail, in one message."""
        done = self.act(person, self.python, "-m", "relayrun.cli", *argv, check=check, umask=umask)
        if not check:
            assert done.returncode == 1, done
            assert re.search(r"^error: ", done.stderr, re.M), done  # behind warnings, if there are any
        return done.stdout + done.stderr

    def stand_in(self, name: str, *program: str) -> Path:
        """A Python of the ranks that is the stand-in program with these options."""
        path = self.folder / name
        asked = f'[[ "$1" != -c ]] || exec "{self.python}" "$@"\n'  # by the check of a submit
        words = " ".join(program)
        path.write_text(
            f'#!/bin/bash\n{asked}shift 2\nexec "{self.python}" "{self.folder}/relay_program.py" "$@" {words}\n'
        )
        path.chmod(0o755)
        return path

    def config(self, name: str, *program: str, real: bool = False, steps: int = 1000, **sections: Any) -> Path:
        """A run config whose directory is `runs/NAME`; its ranks are the stand-in program, or real ones."""
        python = self.python
        if not real:
            python = str(self.stand_in(f"{name}-program", f"--steps={steps}", *program))
        cluster = {
            "name": "test",
            "scheduler": "slurm",
            "python": python,
            "host_python": self.python,
            "environment": {"MASTER_ADDR": "127.0.0.1"},
        }
        job = {"nodes": 1, "ntasks_per_node": 1, "time": "10"} | sections.pop("job", {})
        training = {"steps": steps} | sections.pop("training", {})
        return self.workspace.config(
            name, cluster=cluster, job=job, training=training, run_dir=str(self.run(name).path), **sections
        )

    def run(self, name: str) -> Run:
        return Run(self.folder / "runs" / name)

    def chain(self, run: Run) -> list[str]:
        """Ids of the chain's jobs that are queued or run."""
        return [job.id for job in self.cluster.queue() if job.name == Plan.load(run).job_name]

    def wait_iteration(self, run: Run, attempt: int = 1) -> None:
        self.cluster.wait_until(
            lambda: any(read_json_lines(run.attempt(attempt).metrics)), timeout=300, what=f"a step of attempt {attempt}"
        )

    def wait_over(self, run: Run, timeout: float = 300) -> None:
        self.cluster.wait_until(lambda: not self.chain(run), timeout=timeout, what="the end of the chain's jobs")

    def owners(self, run: Run) -> list[tuple[str, int | None]]:
        return [(line["name"], line["former"]) for line in read_json_lines(run.owners)]

    def log(self, run: Run, job_id: str) -> str:
        return (Path(Plan.load(run).log_folder) / f"{Plan.load(run).job_name}-{job_id}.err").read_text()


def job_of(run: Run, attempt: int) -> str:
    begin = AttemptStart.read(run.attempt(attempt).begin)
    assert begin is not None
    return begin.job_id


def uid(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


@pytest.fixture(scope="module")
def team(accounting: None) -> Iterator[Team]:
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("three users need root, and CI must not skip this")
        pytest.skip("three users need root")
    folder = Path(tempfile.mkdtemp(prefix="relayrun-users-"))
    word = secrets.token_hex(3)
    group, people = f"rrt{word}", [f"rrt{word}-{name}" for name in ("owner", "member", "outsider")]
    cluster = TestCluster(folder / "c", nodes=2, accounting=True)
    watcher = start_watcher("bash", "-c", UNDO, "bash", folder, group, *people)
    try:
        folder.chmod(0o755)
        subprocess.run(["groupadd", group], check=True)
        for name in people:
            options = [] if name.endswith("outsider") else ["--groups", group]
            command = ["useradd", "--no-create-home", "--user-group", "--home-dir", str(folder), *options, name]
            subprocess.run(command, check=True, capture_output=True)
        for name, source in MOUNTS.items():
            (folder / name).mkdir()
            # read-only: a run that is killed leaves them, and who then removes the folder removes what they lead to
            subprocess.run(["mount", "--bind", "--options=ro", str(source), str(folder / name)], check=True)
        code = folder / "code"
        for part in ("relayrun", "launchers", "configs"):
            shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "go=u-w", str(code)], check=True)
        shutil.copy(ROOT / "tests/chain/relay_program.py", folder)
        (folder / "runs").mkdir()
        (code / "logs/slurm/training").mkdir(parents=True)
        for path, mode in ((folder / "runs", 0o2775), (code / "logs/slurm/training", 0o2777)):
            shutil.chown(path, group=group)
            path.chmod(mode)
        (folder / "data").mkdir()
        workspace = Workspace.make(folder / "data")
        cluster.up()
        for name in people:
            cluster.run(["sacctmgr", "--immediate", "add", "user", name, "account=team"])
        yield Team(cluster, folder, group, *people, workspace)
    finally:
        cluster.down()
        for name in MOUNTS:
            subprocess.run(["umount", "--lazy", str(folder / name)], check=False, capture_output=True)
        for name in people:
            subprocess.run(["userdel", name], check=False, capture_output=True)
        subprocess.run(["groupdel", group], check=False, capture_output=True)
        if not any(os.path.ismount(folder / name) for name in MOUNTS):
            shutil.rmtree(folder)
        end_watcher(watcher)


def assert_written_by_its_owner_alone(run: Run) -> None:
    """Others may write nothing but the triggers, though the umask of everybody would let the group."""
    names = {run.triggers, run.path / ".submit.lock"}
    opened = {
        path for path in [run.path, *run.path.rglob("*")] if not path.is_symlink() and path.stat().st_mode & 0o022
    }
    assert opened - names - set(run.triggers.iterdir()) == set()


@pytest.mark.long
def test_one_owner_at_a_time_where_everybody_sees_the_queue(team: Team) -> None:
    config, run = team.config("seen", chain={"auto_requeue": True}), team.run("seen")
    team.relayrun(team.owner, "submit", config)
    team.wait_iteration(run)
    cannot = "this run has jobs already: "
    assert cannot in team.relayrun(team.owner, "submit", config, check=False)
    assert cannot in team.relayrun(team.member, "submit", config, "--take-over", check=False)
    assert f"this run is {team.owner}'s" in team.relayrun(team.outsider, "submit", config, check=False)
    assert cannot in team.relayrun(team.outsider, "submit", config, "--take-over", check=False)
    for word in ("save", "stop"):
        answer = team.relayrun(team.outsider, word, run.path, check=False)
        assert f"only the user {team.owner} and the group {team.group} may" in answer
    assert "running" in team.relayrun(team.member, "status", run.path)
    assert len(team.chain(run)) == 2

    assert "saves after the step that is under way" in team.relayrun(team.member, "stop", run.path)
    team.wait_over(run)
    assert json.loads((run.triggers / "exit.done").read_text())["user"] == team.member
    assert [end.cause for end in ends(run)] == ["exit"]
    assert stop_reason(run)
    reached = resume_point(run).iteration

    refused = team.relayrun(team.member, "submit", config, "--resume", check=False)
    assert f"this run is {team.owner}'s" in refused
    assert "--take-over" in refused
    team.relayrun(team.member, "submit", config, "--take-over")
    own = team.run(f"seen-{team.member}")
    assert Plan.load(own).owner == uid(team.member)
    assert team.owners(own) == [(team.member, uid(team.owner))]
    assert team.owners(run) == [(team.owner, None)]
    team.wait_iteration(own)
    team.relayrun(team.owner, "stop", own.path)
    team.wait_over(own)
    assert [end.cause for end in ends(own)] == ["exit"]
    assert resume_point(own).iteration > reached
    assert [end.cause for end in ends(run)] == ["exit"]
    for each in (run, own):
        assert_written_by_its_owner_alone(each)


@pytest.fixture
def private(team: Team) -> Iterator[None]:
    """Slurm shows everybody their own jobs alone."""
    text = team.cluster.conf.read_text()
    team.cluster.conf.write_text(f"{text}PrivateData=jobs\n")
    team.cluster.run(["scontrol", "reconfigure"])
    yield
    team.cluster.conf.write_text(text)
    team.cluster.run(["scontrol", "reconfigure"])


@pytest.mark.usefixtures("private")
@pytest.mark.long
def test_one_owner_at_a_time_where_nobody_sees_the_jobs_of_others(team: Team) -> None:
    config, run = team.config("hidden", chain={"auto_requeue": True}), team.run("hidden")
    team.relayrun(team.owner, "submit", config)
    team.wait_iteration(run)
    assert team.act(team.member, "squeue", "--noheader").stdout == ""
    assert f"this run is {team.owner}'s" in team.relayrun(team.member, "submit", config, check=False)
    refused = team.relayrun(team.member, "submit", config, "--take-over", check=False)
    assert re.search(rf"attempt 1, in a job of {team.owner}, gave a sign of life \d+ s ago", refused), refused
    assert not re.search(r"state +failed", team.relayrun(team.member, "status", run.path))
    assert f"job {job_of(run, 1)} saves" in team.relayrun(team.member, "save", run.path)

    team.relayrun(team.owner, "stop", run.path)
    team.wait_over(run)
    team.relayrun(team.member, "submit", config, "--take-over")
    own = team.run(f"hidden-{team.member}")
    team.wait_iteration(own)
    assert f"job {job_of(own, 1)} saves" in team.relayrun(team.owner, "stop", own.path)
    team.wait_over(own)
    assert [end.cause for end in ends(own)] == ["exit"]
    assert json.loads((own.triggers / "exit.done").read_text())["user"] == team.owner


@pytest.mark.long
def test_a_limit_of_one_submitted_job_is_no_end_of_the_chain(team: Team) -> None:
    config = team.config("limited", steps=60, chain={"auto_requeue": True}, job={"qos": "one"})
    run = team.run("limited")
    team.relayrun(team.owner, "submit", config)
    team.wait_iteration(run)
    (job_id,) = team.chain(run)
    assert "no successor yet: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit" in team.log(run, job_id)
    team.act(team.owner, "scancel", "--signal=USR2", "--batch", job_id)
    team.cluster.wait_until(lambda: stop_reason(run), what="STOP")
    team.wait_over(run)
    assert [end.cause for end in ends(run)] == ["saved", "done"]
    assert [job_of(run, number) for number in (1, 2)] == [job_id, job_id]
    assert resume_point(run).iteration == 60


def test_stop_names_who_cancelled_the_job_that_waited(team: Team) -> None:
    config, run = team.config("cancelled", chain={"auto_requeue": True}), team.run("cancelled")
    team.relayrun(team.owner, "submit", config)
    team.wait_iteration(run)
    first, successor = sorted(team.chain(run), key=int)
    team.act(team.owner, "scancel", successor)
    team.act(team.owner, "scancel", "--signal=USR2", "--batch", first)
    team.wait_over(run)
    assert [end.cause for end in ends(run)] == ["saved"]
    assert stop_reason(run) == f"the successor, job {successor}, was cancelled by {team.owner}"


@pytest.mark.long
def test_status_says_how_accounting_has_the_last_job(team: Team) -> None:
    config, run = team.config("died", "--crash-at=3", chain={"auto_requeue": False}), team.run("died")
    team.relayrun(team.owner, "submit", config)
    team.cluster.wait_until(run.attempt(1).end.exists, timeout=300, what="the end of the attempt")
    team.wait_over(run)
    last = rf"{job_of(run, 1)}: FAILED, exit code 1, on n\d, .* \(sacct\)"
    team.cluster.wait_until(
        lambda: re.search(last, team.relayrun(team.member, "status", run.path)), timeout=600, what="a word of sacct's"
    )


def test_a_run_that_the_group_can_write_is_refused_before_a_job_starts(team: Team) -> None:
    config, run = team.config("opened", chain={"auto_requeue": True}), team.run("opened")
    team.relayrun(team.owner, "submit", config)
    team.wait_iteration(run)
    team.act(team.owner, "chmod", "g+w", run.plan)
    team.act(team.owner, "scancel", "--signal=USR2", "--batch", job_of(run, 1))
    team.cluster.wait_until(lambda: stop_reason(run), what="STOP")
    team.wait_over(run)
    assert "this job could not go on: its group may write this" in (stop_reason(run) or "")
    refused = team.relayrun(team.owner, "resume", run.path, check=False)
    assert f"chmod -R go-w {run.path}" in refused


@pytest.mark.long
def test_a_colleague_goes_on_with_real_training_to_the_same_bits(team: Team) -> None:
    """With all that a chain writes: views, checkpoints that are removed, copies of the code, TensorBoard's files."""
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-after=5:0.5"}}
    sections: dict[str, Any] = {
        "chain": {"auto_requeue": True},
        "checkpoint": {"interval": 5, "keep_last": 2},
        "tracking": {"tensorboard": True},
        "debug": {"backup_codebase": True},
    }
    whole = team.config("whole", real=True, steps=40, **sections)
    config, run = team.config("real", real=True, steps=40, training={"hooks": [slow]}, **sections), team.run("real")
    team.relayrun(team.owner, "submit", config)
    team.wait_iteration(run)
    team.relayrun(team.member, "save", run.path)
    team.cluster.wait_until((run.triggers / "save.done").exists, timeout=600, what="the save")
    team.relayrun(team.member, "stop", run.path)
    team.wait_over(run)
    for name in ("save.done", "exit.done"):
        done = json.loads((run.triggers / name).read_text())
        assert (done["user"], done["result"]) == (team.member, "saved")
    assert 0 < resume_point(run).iteration < 40
    team.relayrun(team.member, "submit", config, "--take-over", "--set", "training.hooks=[]")
    team.relayrun(team.owner, "submit", whole)
    own = team.run(f"real-{team.member}")
    for each in (own, team.run("whole")):
        team.wait_over(each)
    assert [end.cause for end in ends(own)] == ["done"]
    assert steps(run) | steps(own) == steps(team.run("whole"))
    assert_written_by_its_owner_alone(own)
