"""What a node says of itself, what it means, and what becomes of a node that is sick."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.agent import health, node_facts
from relayrun.control.agent.health import CLOCK_QUESTIONS, BackgroundWork, ClockOffsets, JobHealth, LocalNodeHealth
from relayrun.control.agent.job_nodes import NodeRanks
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.agent.node_facts import (
    TimedProgram,
    decide_actions,
    findings_of_clock,
    findings_of_facts,
    gather_facts,
    judge_findings,
    quick_facts,
)
from relayrun.control.chain import excluded_nodes
from relayrun.control.rundir import node_health
from relayrun.control.rundir.node_health import HealthFinding
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from tests.history import began
from tests.plans import node_checks, plan_with
from tests.waiting import wait_for

GB = 10**9


def found(facts: dict[str, Any], **plan: Any) -> dict[str, HealthFinding]:
    return {each.check: each for each in findings_of_facts("n1", facts, node_checks(mode="warn", **plan))}


def test_a_well_node_has_no_findings_and_its_facts_are_known(tmp_path: Path) -> None:
    facts = gather_facts(node_checks(mode="warn"), tmp_path)
    assert facts["tmp"] > 0
    assert facts["unwritable"] == {}
    assert facts["seconds"] < 60
    assert found(facts) == {}
    assert not list(tmp_path.iterdir())


def test_what_is_short_of_a_limit_is_named_with_both_figures(tmp_path: Path) -> None:
    facts = quick_facts(tmp_path)
    there = found(facts, shm_gb=1e9, tmp_gb=1e9, open_files=10**9)
    assert {check: each.hard for check, each in there.items()} == {
        "shm": False,
        "tmp": False,
        "open_files": False,
    }
    for each in there.values():
        assert each.value < each.limit
    assert there["tmp"].words.endswith(" GB are free in the folder for temporary files, 1e+09 GB wanted")


def test_a_folder_that_cannot_be_written_is_hard(tmp_path: Path) -> None:
    facts = quick_facts(tmp_path / "gone")
    each = found(facts)["run_dir"]
    assert each.hard
    assert each.words == f"cannot be written: {tmp_path / 'gone'}: No such file or directory"


def test_a_folder_for_temporary_files_that_is_on_another_node_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for named, wanted in ((tmp_path, tmp_path), (tmp_path / "of a login node", Path("/tmp")), ("", Path("/tmp"))):
        monkeypatch.setenv("TMPDIR", str(named))
        assert node_facts.temporary_folder() == wanted


def test_the_limit_of_open_files_is_that_of_the_process(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    began(run, 1)
    plan_of(run, open_files=1024).write(run.plan)
    answer = subprocess.run(
        [sys.executable, "-m", "relayrun.control.agent.node_facts", f"--run-dir={run.path}", "--attempt=1"],
        capture_output=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
        timeout=600,
    )
    each = found(json.loads(answer.stdout), open_files=1024)["open_files"]
    assert (each.value, each.limit) == (200, 1024)
    assert each.words == "a process may open 200 files, 1024 wanted (`ulimit -Hn`)"


def plan_of(run: Run, **health: Any) -> Plan:
    values: dict[str, Any] = dict.fromkeys(("grace_period", "min_grace_period", "max_grace_period"), 1.0)
    values |= {name: [] for name in ("srun_options", "command_prefix", "program", "modules")}
    values |= dict.fromkeys(("config_revision", "time_limit", "signal_seconds", "nodes", "ntasks_per_node"), 1)
    plan = Plan(
        run="a/b",
        job_name="a",
        scheduler="local",
        total_steps=1,
        submitted_after_attempt=0,
        chain=ChainSection(),
        cpus_per_task=1,
        sbatch_options={},
        environment={},
        host_python=sys.executable,
        package_root=".",
        log_folder=".",
        **values,
    )
    return plan_with(plan, **health)


@pytest.mark.parametrize(
    ("command", "hard", "words"),
    [
        (["sh", "-c", "echo no lustre; exit 3"], True, "the site's own check (sh): no lustre (exit status 3)"),
        (["sleep", "600"], False, "the site's own check (sleep): no answer within 0.5 s"),
        (["/no/such"], False, "the site's own check (/no/such): /no/such: No such file or directory"),
        (["sh", "-c", "sleep 600 & exit 0"], None, ""),
        (["sh", "-c", "kill -9 $$"], True, "the site's own check (sh): no words (exit status -9)"),
    ],
)
def test_the_sites_own_check(tmp_path: Path, command: list[str], hard: bool | None, words: str) -> None:
    plan = node_checks(mode="warn", command=command, command_seconds=0.5 if command[0] == "sleep" else 60.0)
    there = {each.check: each for each in findings_of_facts("n1", gather_facts(plan, tmp_path), plan)}
    assert (there["command"].hard, there["command"].words) == (hard, words) if words else there == {}


def test_a_program_ends_with_what_it_has_started() -> None:
    program = TimedProgram(["sh", "-c", "sleep 600 & echo $!; wait"], 0.5)
    code, words = program.wait()
    assert (code, words) == (None, "no answer within 0.5 s")
    answered = TimedProgram(["sh", "-c", "sleep 600 & echo $!"], 60.0).wait()
    assert answered[0] == 0
    pid = int(answered[1])
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: not stat.exists() or ") Z " in stat.read_text(), words="the end of what it has started")


PYNVML = """
class NVMLError(Exception): pass
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 2: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetMemoryInfo(handle): return None
def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    assert (kind, counter) == (1, 0)
    return 4 * handle
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return 0x40 | 0x4 if handle else 0x1
def nvmlDeviceGetRemappedRows(handle):
    if handle: return [0, 2, 1, 0]
    raise NVMLError("not supported")
"""


def test_gpus_that_are_lost_or_have_errors_are_found(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML)
    program = TimedProgram([sys.executable, "-m", "relayrun.train.gpu_health"], 60.0)
    assert "gpu_error" in node_facts.gpu_facts(*program.wait())  # this machine has none, or says so
    environment = f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    program = TimedProgram(["env", environment, sys.executable, "-m", "relayrun.train.gpu_health"], 60.0)
    facts = node_facts.gpu_facts(*program.wait())
    there = found(facts, gpus=3)
    assert {check: each.hard for check, each in there.items()} == {
        "gpus": True,
        "gpu_ecc": True,
        "gpu_rows": False,
        "gpu_slowed": False,
    }
    assert there["gpus"].words == "2 GPUs answer, and the job asks for 3; GPU 2: GPU is lost"
    assert there["gpu_ecc"].words == "GPU 1: 4 uncorrected ECC errors since the driver was loaded"
    assert there["gpu_slowed"].words == "GPU 1: its clock is held down by heat (hardware)"


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.05):
        key.data()


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung, threads = threading.Event(), list[threading.Thread]()

    def quick(_folder: Path) -> bool:
        threads.append(threading.current_thread())
        return hung.wait(600)

    monkeypatch.setattr(node_facts, "quick_facts", quick)
    monkeypatch.setattr(health, "FOLDERS_SECONDS", 0.2)
    selector = selectors.DefaultSelector()
    aside, told = BackgroundWork(selector), list[dict[str, Any]]()
    own, began = LocalNodeHealth(node_checks(mode="warn"), [], tmp_path, aside=aside), time.monotonic()
    own.look_between(told.append)
    assert time.monotonic() - began < 60
    wait_for(lambda: told or turn(selector) or aside.attend(), step=0.0)
    assert told[0]["answer"] == "its folders cannot be looked at: no answer within 0.2 s"
    wait_for(lambda: threads)
    hung.set()
    threads[0].join(300)
    turn(selector)
    assert len(told) == 1, "its answer comes too late"


def test_a_program_that_says_something_and_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "BETWEEN_SECONDS", 600.0)
    program = ["sh", "-c", f"echo something; echo >{tmp_path}/said; sleep 600"]
    plan, selector = node_checks(mode="warn", gpus=2, gpu_program=program), selectors.DefaultSelector()
    own, began = LocalNodeHealth(plan, [], tmp_path, aside=BackgroundWork(selector)), time.monotonic()
    own.ranks_end()
    wait_for((tmp_path / "said").exists)
    for _ in range(20):
        turn(selector)
    assert time.monotonic() - began < 300
    assert own._running
    own.end()


def test_a_program_that_another_thread_ends_is_read_by_its_own_alone() -> None:
    """A descriptor that is closed while a thread still reads it may be another's by then, whose words it would take."""
    program, words = TimedProgram(["sleep", "600"], 600.0), list[tuple[int | None, str]]()
    reader = threading.Thread(target=lambda: words.append(program.wait()))
    reader.start()
    time.sleep(0.2)  # it waits
    program.end()
    taken = [os.pipe() for _ in range(8)]  # one of them has the number that was closed
    for heard, told in taken:
        os.set_blocking(heard, False)
        os.write(told, b".")
    reader.join(60)
    for heard, told in taken:
        assert os.read(heard, 1) == b"."
        os.close(heard)
        os.close(told)
    assert words == [(-signal.SIGKILL, "")]


def test_what_is_done_is_heard_without_the_word_that_wakes() -> None:
    aside, told = BackgroundWork(selectors.DefaultSelector()), list[int]()
    aside.start(lambda: 7, told.append, seconds=600.0, otherwise=lambda _: 0)
    for thread in threading.enumerate():
        if thread.name == "aside":
            thread.join(60)
    aside.attend()
    assert told == [7]


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_gpus_are_asked_while_ranks_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    """They answer before the last rank is gone, or behind it."""
    monkeypatch.setattr(health, "BETWEEN_SECONDS", 300.0)
    asked, answers = tmp_path / "asked", tmp_path / "answers"
    held = f"for _ in $(seq 6000); do [ -e {answers} ] && break; sleep 0.05; done" if behind else ":"
    program = ["sh", "-c", f"echo >> {asked}; {held}; echo '{{\"gpus\": []}}'"]
    plan, selector = node_checks(mode="warn", gpus=2, gpu_program=program), selectors.DefaultSelector()
    own, told = LocalNodeHealth(plan, [], tmp_path, aside=BackgroundWork(selector)), list[dict[str, Any]]()
    own.ranks_end()
    wait_for(lambda: behind or not own._running or turn(selector), step=0.0)
    own.look_between(told.append)
    wait_for(lambda: told or own._then or turn(selector), step=0.0)  # until the folders have answered
    assert bool(told) == (not behind)
    answers.touch()
    wait_for(lambda: told or turn(selector), step=0.0)
    (facts,) = told
    assert (facts["gpus"], facts["unwritable"]) == ([], {})
    assert not own._running
    own.ranks_end()
    own.look_between(told.append)
    wait_for(lambda: len(told) == 2 or turn(selector), step=0.0)
    assert len(asked.read_text().splitlines()) == 2


def test_a_library_that_is_missing_is_told_once(tmp_path: Path) -> None:
    plan, selector = node_checks(mode="warn", gpus=2, gpu_program=["/no/such"]), selectors.DefaultSelector()
    own, told = LocalNodeHealth(plan, [], tmp_path, aside=BackgroundWork(selector)), list[dict[str, Any]]()
    for number in range(2):
        own.ranks_end()
        own.look_between(told.append)
        wait_for(lambda number=number: len(told) > number or turn(selector), step=0.0)
    assert [facts.get("gpu_error") for facts in told] == ["/no/such: No such file or directory", None]
    (found_,) = found(told[0], gpus=2).values()
    assert (found_.check, found_.hard) == ("gpus", False)


def clock_of(offset: float, delay: float) -> Callable[[MessageSocket], None]:
    """An agent on a node whose clock is ahead by `offset`, behind a connection that takes `delay` each way."""

    def say(agent: MessageSocket, sent: float) -> None:
        time.sleep(delay)
        here = time.time() + offset
        time.sleep(delay)
        agent.send("clock", sent=sent, here=here)

    def answer(agent: MessageSocket) -> None:
        left = CLOCK_QUESTIONS
        while left:
            for message in agent.receive():
                say(agent, message["sent"])
                left -= 1

    return answer


def test_a_clock_that_differs_is_found_whatever_the_connection_takes() -> None:
    clocks, links, threads, ends = ClockOffsets(), {}, [], []
    for node, (offset, delay) in enumerate([(0.0, 0.0), (7.5, 0.01), (0.0, 0.05)]):
        ours, theirs = socket.socketpair()
        ours.settimeout(300)
        theirs.settimeout(300)
        links[node] = MessageSocket(ours)
        ends.append(MessageSocket(theirs))
        threads.append(threading.Thread(target=clock_of(offset, delay), args=[ends[-1]]))
        threads[-1].start()
    clocks.ask(links, links)
    for node, link in links.items():
        left = CLOCK_QUESTIONS
        while left:
            for message in link.receive():
                assert message["kind"] == "clock"
                clocks.hear(node, message)
                left -= 1
    for thread in threads:
        thread.join(300)
    for line in (*links.values(), *ends):
        line.close()
    offsets = clocks.offsets()
    assert abs(offsets[1][0] - 7.5) <= offsets[1][1] + offsets[0][1] + offsets[2][1]
    plan = node_checks(mode="warn", clock_seconds=2.0)
    there = {node: list(findings_of_clock(f"n{node}", *known, plan)) for node, known in offsets.items()}
    assert [bool(there[node]) for node in range(3)] == [False, True, False]
    assert there[1][0].words.startswith("its clock is 7.")
    assert " s ahead (± " in there[1][0].words


def test_one_clock_alone_is_right() -> None:
    clocks = ClockOffsets()
    clocks.hear(0, {"sent": time.time(), "here": 0.0})
    assert clocks.offsets() == {}


def finding(node: str, check: str, *, hard: bool = False) -> HealthFinding:
    return HealthFinding(node=node, check=check, value=1, limit=0, words=check, hard=hard)


def test_what_every_node_has_makes_none_sick() -> None:
    every = [finding(node, "gpus", hard=True) for node in ("n0", "n1")]
    seen, sick = judge_findings([*every, finding("n1", "gpu_ecc", hard=True)], nodes=2, mode="warn")
    assert [each.reason for each in seen] == ["every node has it", "every node has it", ""]
    assert {node: each.check for node, each in sick.items()} == {"n1": "gpu_ecc"}
    assert judge_findings(every[:1], nodes=1, mode="warn")[1].keys() == {
        "n0"
    }  # one alone has nobody to be compared with


def test_what_is_less_makes_a_node_sick_only_where_that_is_asked_for() -> None:
    soft = [finding("n0", "tmp"), finding("n1", "matmul"), finding("n1", "gpus", hard=True)]
    assert judge_findings(soft, nodes=3, mode="warn")[1].keys() == {"n1"}
    sick = judge_findings(soft, nodes=3, mode="exclude")[1]
    assert {node: each.check for node, each in sick.items()} == {"n1": "gpus", "n0": "tmp"}


@pytest.mark.parametrize(
    ("wanted", "spare", "actions"),
    [
        (2, 2, ["left out", "left out"]),
        (2, 1, ["left out", "warned"]),  # the hard one comes first
        (2, 0, ["ended", "warned"]),
    ],
)
def test_a_node_is_left_out_where_training_goes_on_without_it(wanted: int, spare: int, actions: list[str]) -> None:
    places = NodeRanks(wanted, spare=spare)
    sick = {"n1": finding("n1", "gpus", hard=True), "n0": finding("n0", "tmp")}
    found = decide_actions(sick, left=places.left, fitting=places.fitting)
    assert [found[node][0] for node in ("n1", "n0")] == actions


def test_what_is_done_is_on_record_and_said(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    began(run, 1)
    said: list[str] = []
    health = JobHealth(run.attempt(1), node_checks(mode="warn", tmp_gb=1.0), say=said.append)
    health.hear(0, {"kind": "health", "facts": {"tmp": 2 * GB}})
    health.hear(1, {"kind": "health", "facts": {"tmp": 0, "unwritable": {"run_dir": "/r: Read-only"}}})
    assert 1 in health.reported
    left_out, ends = health.look({0: "n0", 1: "n1"}, NodeRanks(2), ended_restart=3)
    assert (left_out, ends) == ({1: "cannot be written: /r: Read-only (node health)"}, True)
    first, second = node_health.read_findings(run.attempt(1))
    assert (first.check, first.action, first.reason, first.restart) == (
        "run_dir",
        "ended",
        "no other node takes its place",
        3,
    )
    assert (second.check, second.action, second.value, second.limit) == ("tmp", "warned", 0, GB)
    assert said == [
        "n1: cannot be written: /r: Read-only; ends the attempt, no other node takes its place",
        "n1: 0 GB are free in the folder for temporary files, 1 GB wanted; goes on",
    ]
    assert node_health.why_health_ended_attempt(run.attempt(1)) == "n1: cannot be written: /r: Read-only"
    assert node_health.sick_nodes(run.attempt(1)) == {"n1": "cannot be written: /r: Read-only"}
    assert not health.look({0: "n0"}, NodeRanks(2), ended_restart=3)[0], "it is forgotten"


def test_a_sick_node_is_excluded_at_its_first_strike(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    excluded_nodes.record_node_failures(run, 1, {"n1": "2 GPUs answer"}, now=100.0, sick=True)
    excluded_nodes.record_node_failures(run, 1, {"n1": "killed", "n2": "killed"}, now=100.0)
    strikes = excluded_nodes.read_node_failures(run)
    assert [(entry.node, entry.sick) for entry in strikes] == [("n1", True), ("n2", False)]
    assert excluded_nodes.worst_nodes(strikes, nodes=40, now=200.0) == ["n1"]
    assert excluded_nodes.worst_nodes(strikes, nodes=40, now=200.0 + excluded_nodes.FAILURE_EXPIRE_SECONDS) == []
