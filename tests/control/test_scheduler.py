"""Jobs as they are asked for: options, environment, steps on nodes, signals, fallback jobs."""

from __future__ import annotations

import contextlib
import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import local_srun
from relayrun.control.scheduler.base import FallbackOrder, Job, Scheduler, clean_environment
from relayrun.control.scheduler.slurm import Slurm, jobs_by_name
from relayrun.control.scheduler.slurm_commands import (
    parse_job,
)
from relayrun.errors import SchedulerError
from relayrun.submit.check.findings import Findings
from relayrun.submit.check.slurm import _test_job
from tests.control.slurm_doubles import LINE, PLAN, slurm_of
from tests.plans import plan_with


def test_a_new_job_inherits_nothing_from_the_surrounding_one() -> None:
    environment = {
        "SLURM_JOB_ID": "1",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "2",
        "SQUEUE_STATES": "RUNNING",
        "RELAYRUN_RUN_DIR": "r",
        "SLURM_CONF": "/etc/slurm.conf",
        "PATH": "/bin",
        "WANDB_API_KEY": "k",
    }
    assert set(clean_environment(environment)) == {"SLURM_CONF", "PATH", "WANDB_API_KEY"}


def test_a_job_whose_begin_failed_says_so_in_its_comment() -> None:
    job = parse_job(LINE + " Comment=relayrun:begin-failed=2@n0,n7")
    assert job.begin_failed_on == "n0,n7"
    other = parse_job(LINE + " Comment=relayrun:0a1b2c")
    assert other.begin_failed_on == ""


def test_a_step_on_the_batch_host_asks_for_it_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Slurm 24.05 `--relative=0` is another node for each step; with a topology it is that of a switch."""
    slurm = slurm_of(tmp_path, monkeypatch, srun='echo "$@"')
    names = ["batch"]
    monkeypatch.setattr(slurm, "ask", lambda _command: "\n".join(names))
    monkeypatch.setattr(slurm, "query", lambda _id: parse_job(LINE.replace("BatchHost=n0", "BatchHost=n1")))
    steps = [slurm.run_beside("17", ["env"], nodes=1).split()]
    monkeypatch.setattr("relayrun.control.scheduler.slurm.subprocess.Popen", lambda words, **_: steps.append(words))
    slurm.guard("17", ["env"], log=tmp_path / "guard.log")
    assert len(steps) == 2
    for words in steps:
        assert "--nodelist=n1" in words
        assert not [word for word in words if word.startswith("--relative")]
    names.append("relayrun-guard")
    slurm.guard("17", ["env"], log=tmp_path / "guard.log")  # a watch that starts again
    assert len(steps) == 2


def rendezvous(monkeypatch: pytest.MonkeyPatch, slurm: Slurm, name: str = "localhost") -> tuple[str, int]:
    monkeypatch.setattr("relayrun.control.scheduler.slurm_nodes.SlurmNodes.expand", lambda _self, _nodes: [name])
    found = slurm.rank_launch(Plan.of(PLAN), parse_job(LINE), leave_signal=None).environment
    return found["MASTER_ADDR"], int(found["MASTER_PORT"])


def test_each_start_meets_at_a_free_port_that_no_connection_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = tmp_path / "range"
    ports.write_text("21000\t60999\n")
    monkeypatch.setattr(local_srun, "CONNECTION_PORTS_FILE", ports)
    with contextlib.ExitStack() as held:
        for port in range(local_srun.LOWEST_PORT, 21_000, 2):
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # another program has it
                listener.bind(("", port))
        found = {rendezvous(monkeypatch, Slurm())[1] for _ in range(20)}
    assert all(local_srun.LOWEST_PORT < port < 21_000 and port % 2 for port in found)
    assert len(found) > 10  # the next start does not meet the same neighbour again


def test_a_node_whose_name_does_not_resolve_is_reached_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, sinfo="echo 10.1.2.3")
    assert rendezvous(monkeypatch, slurm, "n.invalid")[0] == "10.1.2.3"
    assert rendezvous(monkeypatch, slurm)[0] == "localhost"
    slurm = slurm_of(tmp_path, monkeypatch, sinfo="exit 1")
    assert rendezvous(monkeypatch, slurm, "n.invalid")[0] == "n.invalid"  # the ranks say why


@pytest.mark.parametrize(
    ("memory", "options", "dropped", "kept"),
    [
        ("MinMemoryCPU=50M", [], ["SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU"], ["SLURM_MEM_PER_CPU"]),
        ("MinMemoryNode=50M", [], ["SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"], ["SLURM_MEM_PER_NODE"]),
        ("MinMemoryNode=0", [], [], ["SLURM_MEM_PER_CPU", "SLURM_GPUS_PER_NODE"]),
        ("MinMemoryNode=0", ["--gres=gpu:1"], ["SLURM_GPUS_PER_NODE", "SLURM_GPUS"], []),
        ("MinMemoryNode=0", ["--gpus-per-node=1"], ["SLURM_GPUS_PER_NODE", "SLURM_GPUS"], []),
    ],
)
def test_variables_of_the_job_in_which_a_job_was_submitted_do_not_reach_the_ranks(
    monkeypatch: pytest.MonkeyPatch, memory: str, options: list[str], dropped: list[str], kept: list[str]
) -> None:
    """`sbatch` inside of `salloc --mem=100` hands on SLURM_MEM_PER_NODE, and beside --mem-per-cpu srun refuses it."""
    monkeypatch.setattr("relayrun.control.scheduler.slurm_nodes.SlurmNodes.expand", lambda _self, _nodes: ["localhost"])
    job = parse_job(LINE.replace("MinMemoryNode=100M", memory))
    unset = Slurm().rank_launch(replace(Plan.of(PLAN), srun_options=options), job, leave_signal=None).unset
    assert {"SLURM_TIMELIMIT", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", *dropped} <= set(
        unset
    )
    assert not set(kept) & set(unset)


def test_the_options_of_a_job_that_asks_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "PartitionName=low Default=NO\nPartitionName=debug Default=YES\n"
    account = 'case "$*" in *DefaultAccount*) echo proj ;; *) echo ;; esac'
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f"printf '{rows}'", sacctmgr=account)
    assert slurm.default_options() == {"partition": "debug", "account": "proj", "qos": "normal"}
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=f"printf '{rows}'", sacctmgr="echo You are not running; exit 1")
    assert slurm.default_options() == {"partition": "debug"}  # without accounting


def test_nodes_that_a_controller_does_not_know_yet_are_neither_down_nor_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 26.05, right after `scontrol reconfigure`."""
    refused = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
    for states, known in (("unknown unknown*", False), ("idle down*", True), ("idle*", True)):
        words = " ".join(f"'{state}'" for state in states.split())
        slurm = slurm_of(tmp_path, monkeypatch, sinfo=f"printf '%s\\n' {words}", sbatch=refused)
        assert slurm._node_is_down("n0") is known
        assert slurm.nodes.enough_up(Plan.of(PLAN), tmp_path / "job", {}) is not known


NOT_AVAILABLE = "Requested node configuration is not available"
NODES = (
    "debug*|n0|idle|8|16000|gpu:a100:4(S:0-1)|test\\ndebug*|n1|drained|8|16000|gpu:4|test\\n"
    "high|n1|drained|8|16000|gpu:4|test\\ndebug*|n2|maint|16|64000|gpu:4,nvme:1|test,big\\n"
)


@pytest.mark.parametrize(
    ("said", "options", "away"),
    [
        (NOT_AVAILABLE, "--nodes=2", ["n1 (drained)", "n2 (maint)"]),
        (NOT_AVAILABLE, "--nodes=2 --ntasks-per-node=2 --cpus-per-task=4 --mem=16000 --gres=gpu:4", ["n1", "n2"]),
        (NOT_AVAILABLE, "--partition=high,other", ["n1"]),
        (NOT_AVAILABLE, "--cpus-per-task=16", ["n2"]),
        (NOT_AVAILABLE, "--mem=60G --constraint=big", ["n2"]),
        (NOT_AVAILABLE, "--constraint=big&test --gpus-per-node=a100:4", ["n2"]),
        (NOT_AVAILABLE, "--nodes=3", ["n1", "n2"]),
        # what no state of the nodes lets start
        (NOT_AVAILABLE, "--nodes=4", []),
        (NOT_AVAILABLE, "--nodes=3-5 --exclude=n0", []),
        (NOT_AVAILABLE, "--nodes=2 --partition=high", []),
        (NOT_AVAILABLE, "--nodes=2 --cpus-per-task=16", []),
        (NOT_AVAILABLE, "--ntasks-per-node=8 --cpus-per-task=3", []),
        (NOT_AVAILABLE, "--gpus-per-node=5", []),
        (NOT_AVAILABLE, '--gres="gpu:a100:8"', []),
        (NOT_AVAILABLE, "--mem=65G", []),
        (NOT_AVAILABLE, "--nodes=2 --constraint=big", []),
        (NOT_AVAILABLE, "--exclude=n[1-2]", []),  # n0 is up: the reason is another
        ("Invalid partition name specified", "--nodes=2", []),
    ],
)
def test_a_job_that_waits_for_nodes_that_are_away_is_not_refused_if_it_fits_the_cluster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: str,
    options: str,
    away: list[str],
) -> None:
    script = tmp_path / "job"
    script.write_text("#!/bin/sh\n" + "".join(f"#SBATCH {option}\n" for option in options.split()))
    sbatch = f"case \"$*\" in *--test-only*) echo 'allocation failure: {said}' >&2; exit 1 ;; *) echo 7 ;; esac"
    shown = "echo 'PartitionName=debug Default=YES MaxNodes=UNLIMITED TotalNodes=3'"
    slurm = slurm_of(tmp_path, monkeypatch, sbatch=sbatch, sinfo=f"printf '{NODES}'", scontrol=shown)
    plan = replace(Plan.of(PLAN), log_folder=str(tmp_path))
    findings = Findings(cast(Any, SimpleNamespace(model_dump=lambda **_: {})))
    _test_job(slurm, script, {}, findings)
    (found,) = findings.all
    if not away:
        with pytest.raises(SchedulerError, match=said):
            slurm.submit_first(plan, script)
        assert (found.level, said in found.words) == ("error", True)
        return
    assert slurm.submit_first(plan, script) == "7"
    for words in (caplog.text, found.words):
        assert [node for node in ("n0", "n1", "n2") if f"{node} (" in words.partition("waits for some of")[2]] == [
            each.partition(" ")[0] for each in away
        ]
    assert found.level == "warning"


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [
        ("MaxTime=00:00:30", "is more than partition debug allows, 00:00:30"),
        ("MaxNodes=0", "1 nodes are more than partition debug allows, 0"),
        ("MinNodes=2", "1 nodes are fewer than partition debug asks for, 2"),
        ("TotalNodes=0", "1 nodes are more than partition debug has, 0"),
        ("MaxTime=UNLIMITED MaxNodes=UNLIMITED TotalNodes=1", None),
    ],
)
def test_a_submit_refuses_what_the_limits_of_the_partition_never_let_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, wrong: str | None
) -> None:
    """`sbatch` queues such a job, and `sbatch --test-only` takes one of too long a time (Slurm 22.05)."""
    shown = f"echo 'PartitionName=debug Default=YES {limits}'; echo 'PartitionName=other Default=NO'"
    slurm = slurm_of(tmp_path, monkeypatch, sbatch="echo 7", scontrol=shown)
    (tmp_path / "job").write_text("#!/bin/sh\n")
    plan = replace(Plan.of(PLAN), log_folder=str(tmp_path))
    for further in ({"qos": "long"}, {"partition": "other,debug"})[: 2 if "Total" not in limits else 0]:
        lifted = replace(plan, sbatch_options=further)  # a QOS may lift a limit, and one of the partitions will do
        assert slurm.submit_first(lifted, tmp_path / "job") == "7"
    if wrong is None:
        assert slurm.submit_first(plan, tmp_path / "job") == "7"
        return
    with pytest.raises(SchedulerError, match=wrong):
        slurm.submit_first(plan, tmp_path / "job")


def test_a_signal_is_the_ranks_and_never_the_batch_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    steps = "printf '%s\\n' 17.batch 17.extern 17.0 17.12"
    found = slurm_of(tmp_path, monkeypatch, squeue=steps, scancel=f'echo "$@" >> {asked}')
    found.signal_ranks("17", signal.SIGUSR1)
    assert asked.read_text() == "--signal=USR1 17\n"
    found.signal_ranks("17", signal.SIGKILL)
    assert asked.read_text().splitlines()[1:] == ["--signal=KILL 17.0", "--signal=KILL 17.12"]


def test_jobs_of_several_names_have_the_reason_why_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "17|RUNNING|None|a",
        "18|PENDING|Dependency|a",
        "19|PENDING|None|b|c",
        "20|RUNNING|None|other",
        "21|PENDING",
    ]
    slurm_of(tmp_path, monkeypatch, squeue=f"printf '%s\\n' {' '.join(map(repr, lines))}")
    found = jobs_by_name(["a", "b|c"], patience=1)
    shown = {name: [(job.id, job.state, job.reason) for job in jobs] for name, jobs in found.items()}
    assert shown == {
        "a": [("17", "RUNNING", ""), ("18", "PENDING", "Dependency")],
        "b|c": [("19", "PENDING", "")],
    }


def test_a_new_job_gets_the_users_python_path_and_not_the_supervisors() -> None:
    inside = {"PYTHONPATH": "/relayrun", "RELAYRUN_USER_PYTHONPATH": "/my/hooks"}
    assert clean_environment(inside) == {"PYTHONPATH": "/my/hooks"}
    assert clean_environment(inside | {"RELAYRUN_USER_PYTHONPATH": ""}) == {}
    inside["PYTHONSAFEPATH"] = (
        "1"  # the supervisor's: a program finds the modules beside it in every job, not the first
    )
    assert clean_environment(inside) == {"PYTHONPATH": "/my/hooks"}
    mine = {"RELAYRUN_USER_PYTHONSAFEPATH": "1"}
    assert clean_environment(inside | mine) == {"PYTHONPATH": "/my/hooks", "PYTHONSAFEPATH": "1"}
    assert clean_environment({"PYTHONPATH": "/my/hooks"}) == {"PYTHONPATH": "/my/hooks"}


def test_a_free_port_is_one_that_no_connection_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(local_srun.CONNECTION_PORTS_FILE.read_text().split()[0])
    found = {local_srun.free_port() for _ in range(20)}
    assert len(found) > 10
    if first >= local_srun.LOWEST_PORT + 1000:
        assert all(local_srun.LOWEST_PORT <= port < first for port in found)
    monkeypatch.setattr(local_srun, "CONNECTION_PORTS_FILE", tmp_path / "range")
    (tmp_path / "range").write_text("1024\t65535\n")  # no room below it: the kernel chooses
    assert local_srun.free_port("") > 1024


def test_a_second_scheduler_writes_eleven_methods(capsys: pytest.CaptureFixture[str]) -> None:
    """The other methods have defaults, with which a job is queued, begins and goes on."""

    def say(self: Scheduler, *said: object, **_: object) -> str:
        print(*said)
        return "1"

    assert len(Scheduler.__abstractmethods__) == 11
    printer = type("Printer", (Scheduler,), dict.fromkeys(Scheduler.__abstractmethods__, say))()
    plan, job = Plan.of(PLAN), Job(id="1", name="n", state="RUNNING")
    assert printer.submit_first(plan, Path("job.sbatch")) == "1"
    printer.adopt(job, plan)
    printer.guard("1", ["true"], log=Path("log"))
    printer.confirm_begin(job, followed=True, log=None)
    printer.note_stop("1", "ada")
    assert printer.nodes is printer.fallback_jobs is printer.reservation_end("r") is printer.cancelled_by("1") is None
    assert printer.single_task_command(plan, cpus_per_task="1") == []
    with pytest.raises(SchedulerError, match="cannot delay"):
        printer.postpone("1", delay=1)
    assert "job.sbatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, False),
        ({"partition": "large"}, True),
        ({"partition": "large,debug"}, False),
        ({"partition": "other"}, False),
    ],
)
def test_a_fallback_job_is_as_large_as_its_partition_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], whole: bool
) -> None:
    """On Slurm 26.05 `sbatch --test-only` takes a job of one node that its partition never lets start."""
    shown = "echo 'PartitionName=debug Default=YES MinNodes=0'; echo 'PartitionName=large Default=NO MinNodes=2'"
    slurm = slurm_of(tmp_path, monkeypatch, scontrol=shown, sbatch=f'echo "$@" >>{tmp_path}/asked; echo 7')
    order = FallbackOrder(job_id="6", failed_begins=0)
    given: dict[str, str | None] = {"nodes": "2", **options}
    assert slurm.fallback_jobs.queue(tmp_path / "script", name="x", order=order, options=given, limit=60) == "7"
    queued = (tmp_path / "asked").read_text().splitlines()[-1]
    assert "--test-only" not in queued
    assert ("--nodes=2" in queued) is whole


@pytest.mark.parametrize("known", [None, "BatchHost="])
def test_no_step_on_the_batch_host_where_slurm_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch)
    job = None if known is None else parse_job(LINE.replace("BatchHost=n0", known))
    monkeypatch.setattr(slurm, "query", lambda _id: job)
    with pytest.raises(SchedulerError, match="does not say on which node the batch script of job 17 runs"):
        slurm.run_beside("17", ["env"], nodes=1)


@pytest.mark.parametrize("comment", ["", "relayrun:starts-only-if-job=x-fails,failed-begins=1", "a word"])
def test_a_fallback_job_without_its_order_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comment: str
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, squeue=f"echo '{comment}'")
    with pytest.raises(SchedulerError, match="the comment of job 17 does not say which job it stands behind"):
        slurm.fallback_jobs.order("17")


@pytest.mark.parametrize(("mode", "asked"), [("requeue", True), ("singleton", True), ("requeue", False)])
def test_a_job_that_slurm_would_requeue_otherwise_than_the_plan_is_changed(
    monkeypatch: pytest.MonkeyPatch, mode: str, *, asked: bool
) -> None:
    """A site may forbid it, which only a chain of one job cannot do without."""
    slurm, changes = Slurm(patience=0), list[str]()

    def refuse(_job: str, *words: str) -> None:
        changes.extend(words)
        raise SchedulerError("Access denied")

    monkeypatch.setattr(slurm, "update_job", refuse)
    plan = plan_with(Plan.of(PLAN), mode=mode, auto_requeue=True)
    job = replace(parse_job(LINE), id="7", name=plan.job_name, requeue=not asked)
    if asked and mode == "requeue":
        with pytest.raises(SchedulerError, match="Access denied"):
            slurm.adopt(job, plan)
    else:
        slurm.adopt(job, plan)
    assert changes == (["Requeue=1"] if asked else [])


@pytest.mark.parametrize("outlives", [False, True])
def test_the_ranks_of_a_job_that_outlives_nodes_have_a_step_of_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, outlives: bool
) -> None:
    slurm = slurm_of(tmp_path, monkeypatch, scontrol="printf 'n0\\nn1\\n'")
    monkeypatch.setattr(slurm, "_resolvable", lambda node: node)
    plan = plan_with(Plan.of(PLAN), spare_nodes=int(outlives))
    if outlives:
        plan = plan_with(plan, recovery="node")
    assert plan.outlives_nodes is outlives
    found = slurm.rank_launch(plan, replace(parse_job(LINE), nodes="n[0-1]", num_nodes=2), leave_signal=None)
    assert [*found.nodes] == (["n0", "n1"] if outlives else [])
    assert ("--overlap" in found.command) is outlives
    assert f"--nodes={1 if outlives else 2}" in found.command


@pytest.mark.parametrize("refused", [False, True])
def test_a_fallback_job_has_one_node_where_a_site_takes_such_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    """sbatch queues also what no partition ever lets start."""
    slurm, queued = Slurm(patience=0), list[list[str]]()

    def order(_words: list[str]) -> None:
        if refused:
            raise SchedulerError("sbatch: error: every job needs GPUs")

    monkeypatch.setattr(slurm, "order", order)
    monkeypatch.setattr(slurm, "partitions", list)
    monkeypatch.setattr(slurm, "submit_once", lambda words, **_: queued.append(words) or "8")
    options = {"nodes": "4", "gpus-per-node": "8", "account": "ada", "time": "600"}
    order_ = FallbackOrder(job_id="7", failed_begins=0)
    assert slurm.fallback_jobs.queue(tmp_path / "s.sbatch", name="n", order=order_, options=options, limit=10) == "8"
    assert ("--gpus-per-node=8" in queued[0], "--account=ada" in queued[0]) == (refused, True)
