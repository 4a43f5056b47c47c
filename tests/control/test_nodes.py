from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.chain.excluded_nodes import (
    NodeFailureRecord,
    read_node_failures,
    record_node_failures,
    worst_nodes,
)
from relayrun.control.chain.failure_reason import first_failure_text
from relayrun.control.rundir.records import RankFailure
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.error_lines import blamed_nodes


def failure(rank: int, node: str, error: str = "CUDA error", time: float = 1.0) -> RankFailure:
    return RankFailure(rank=rank, node=node, error=error, time=time)


def test_the_node_of_a_rank_that_srun_names_first_is_blamed() -> None:
    log = "srun: error: n1: task 3: Killed\nsrun: Terminating StepId=5.0\nsrun: error: n0: tasks 0-2: Terminated\n"
    assert blamed_nodes(log, [], ntasks=4) == {"n1": "Killed"}


def test_a_node_failure_counts_whatever_else_was_said() -> None:
    log = "srun: error: Node failure on n1\nsrun: error: n0: task 0: Killed\n"
    assert blamed_nodes(log, [], ntasks=2) == {"n1": "node failure"}


def test_the_same_error_on_all_ranks_blames_nobody() -> None:
    log = "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 1\n"
    assert blamed_nodes(log, [failure(0, "n0"), failure(1, "n1")], ntasks=2) == {}


def test_of_several_that_failed_the_one_whose_words_came_first_is_blamed() -> None:
    log = "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 1\n"
    failures = [failure(1, "n1", "CUDA error: ECC", 1.0), failure(0, "n0", "connection closed", 2.0)]
    found = blamed_nodes(log, failures, ntasks=2)
    assert found == {"n1": "CUDA error: ECC"}


@pytest.mark.parametrize(
    "said",
    [
        "KeyError: 'text'",
        "AssertionError: world size",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "HookFailed: hook myhook:H, after_step: RuntimeError: boom of mine",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_a_cause_that_is_not_a_nodes_strikes_none(said: str) -> None:
    ends = f"srun: error: n1: task 1: Exited with exit code 1\n{TERMINATING}srun: error: n0: task 0: Terminated\n"
    assert blamed_nodes(f"{said}\n{ends}", [], ntasks=2) == {}
    assert blamed_nodes(ends, [failure(1, "n1", said)], ntasks=2) == {}
    assert blamed_nodes(ends, [], ntasks=2) == {}  # without any words
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.\nsrun: error: n1: task 1: Out Of Memory\n"
    assert blamed_nodes(killed, [], ntasks=2) == {}


def test_without_evidence_nobody_is_blamed() -> None:
    assert blamed_nodes("", [], ntasks=2) == {}
    assert blamed_nodes("Traceback ...", [failure(0, "n0"), failure(3, "n1", "other")], ntasks=4) == {}


PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:26077"
TERMINATING = "srun: launch/slurm: _step_signal: Terminating StepId=5.0\n"


def test_a_killed_rank_leaves_no_words_and_its_neighbours_are_no_evidence() -> None:
    log = f"srun: error: n1: task 1: Killed\n{TERMINATING}srun: error: n0: task 0: Exited with exit code 1\n"
    assert blamed_nodes(log, [failure(0, "n0", PEER)], ntasks=2) == {"n1": "Killed"}


def test_what_a_neighbour_said_is_no_evidence_although_its_end_was_reported_first() -> None:
    """As a real srun printed it: rank 0 saw the connection closed and was faster than the news of rank 3's end."""
    log = (
        "srun: error: n0: task 0: Exited with exit code 1\n"
        f"{TERMINATING}"
        "slurmstepd-n0: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-11-22T13:28:23 ***\n"
        "srun: error: n1: task 3: Killed\n"
        "srun: error: n1: task 2: Terminated\n"
        "srun: error: n0: task 1: Terminated\n"
        "srun: error: n2: task 5: Terminated\n"
        "srun: error: n2: task 4: Killed\n"  # by srun, KillWait after SIGTERM
        "srun: Force Terminated StepId=5.0\n"
    )
    assert blamed_nodes(log, [failure(0, "n0", PEER)], ntasks=6) == {"n1": "Killed"}


@pytest.mark.parametrize(
    "words",
    [
        PEER,
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was a "
        "network error, NCCL version 2.21.5 ncclRemoteError",
        "RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        "DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: Application timeout caused pair closure",
        "SystemExit: Terminated",
    ],
)
def test_words_that_only_say_that_another_rank_is_gone_name_no_node(words: str) -> None:
    assert blamed_nodes("", [failure(0, "n0", words)], ntasks=2) == {}
    log = "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Segmentation fault\n"
    assert blamed_nodes(log, [failure(0, "n0", words)], ntasks=2) == {"n1": "Segmentation fault"}


def test_ranks_that_srun_killed_because_they_did_not_end_are_no_evidence() -> None:
    log = (
        f"srun: error: n0: task 0: Exited with exit code 1\n{TERMINATING}"
        "srun: error: n1: task 1: Killed\nsrun: error: n2: task 2: Killed\n"
    )
    assert blamed_nodes(log, [failure(0, "n0", PEER)], ntasks=3) == {}
    log = f"{TERMINATING}srun: error: n0: task 0: Terminated\nsrun: error: n1: task 1: Killed\n"
    assert blamed_nodes(log, [], ntasks=2) == {}


def test_the_same_end_of_every_task_blames_nobody() -> None:
    log = (
        f"srun: error: n0: tasks 0-1: Exited with exit code 127\n{TERMINATING}"
        "srun: error: n[1-2]: tasks 2-5: Exited with exit code 127\n"
    )
    assert blamed_nodes(log, [], ntasks=6) == {}
    assert blamed_nodes("srun: error: n[0-1]: tasks 0-1: Killed\n", [], ntasks=2) == {}


def test_one_node_that_cannot_start_its_tasks_is_blamed() -> None:
    log = (
        f"srun: error: n1: tasks 2-3: Exited with exit code 127\n{TERMINATING}"
        "srun: error: n0: tasks 0-1: Terminated\nsrun: error: n2: tasks 4-5: Terminated\n"
    )
    assert blamed_nodes(log, [], ntasks=6) == {"n1": "Exited with exit code 127"}
    log = "srun: error: Task launch for StepId=5.0 failed on node n1: Communication connection failure\n"
    assert blamed_nodes(log, [], ntasks=2) == {"n1": "Communication connection failure"}


def test_the_same_words_of_several_nodes_blame_nobody() -> None:
    log = "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 1\n"
    said = [failure(0, "n0", "ValueError: bad row"), failure(1, "n1", "ValueError: bad row"), failure(2, "n2", PEER)]
    assert blamed_nodes(log, said, ntasks=3) == {}


def test_several_lost_nodes_are_all_blamed_and_only_slurm_can_say_so() -> None:
    log = "print of a rank: node failure on n7\nsrun: error: Node failure on n[08-10]\n"
    assert blamed_nodes(log, [], ntasks=4) == {"n08": "node failure", "n09": "node failure", "n10": "node failure"}


PREFIXES = [
    "slurmstepd-n0: ",
    "slurmstepd: ",
    "[2026-11-26T12:02:04.086] ",  # since Slurm 25.05
    "[2026-11-26T12:02:04+01:00] ",
    "[Nov 26 12:02:04] ",
    "0: slurmstepd-n0: ",
    "Nov 26 12:02:04 n0 slurmstepd[71]: ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("what", ["STEP 116.0", "JOB 116"])
def test_what_slurm_ended_is_blamed_on_nobody_whatever_stands_before_its_words(prefix: str, what: str) -> None:
    log = (
        f"{prefix}error: *** {what} ON n0 CANCELLED AT 2026-11-26T12:02:04 DUE to SIGNAL Killed ***\n"
        "srun: error: n1: task 1: Killed\nsrun: error: n0: task 0: Killed\n"
    )
    assert blamed_nodes(log, [], ntasks=3) == {}
    assert first_failure_text(log, []) == ""


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
def test_a_lost_node_counts_whatever_stands_before_the_words(prefix: str) -> None:
    found = blamed_nodes(f"{prefix}srun: error: Node failure on n1\n", [], ntasks=2)
    assert found == blamed_nodes(f"{prefix}error: Node failure on n1\n", [], ntasks=2) == {"n1": "node failure"}


LISTENING = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 25007, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
ENDED = (
    f"srun: error: n0: task 0: Exited with exit code 1\n{TERMINATING}"
    "[2026-11-26T12:02:04.086] error: *** STEP 116.0 ON n0 CANCELLED AT 2026-11-26T12:02:04 ***\n"
    "srun: error: n1: task 1: Killed\n"
)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (f"[rank0]: {LISTENING}", LISTENING),
        ("0: OSError: [Errno 98] Address already in use", "Address already in use"),
        ("/venv/bin/python: can't open file '/home/ann/tran.py': [Errno 2] No such file or directory", "tran.py"),
        ("bash: tran.sh: No such file or directory", "tran.sh"),
        ("sh: 0: cannot open tran.sh: No such file", "tran.sh"),
        ("/usr/bin/python3: No module named tran", "No module named tran"),
        ("socket.gaierror: [Errno -2] Name or service not known", "Name or service not known"),
        (
            "[W1126 12:01:00.123 socket.cpp:697] [c10d] The IPv4 network addresses of (n0, 25007) cannot be retrieved "
            "(gai error: -2 - Name or service not known).",
            "(n0, 25007)",
        ),
        (" 3: OSError: [Errno 98] Address already in use", "Address already in use"),  # of ten tasks and more
        ("[default0]:[rank0]: OSError: [Errno 98] Address already in use", "Address already in use"),  # of torchrun
        ("[1,0]<stderr>:OSError: [Errno 98] Address already in use", "Address already in use"),  # of mpirun
        ("ConnectionError: Tried to use port `29500`, but another process is utilizing it.", "29500"),  # accelerate
        ("RuntimeError: port 29500 is already in use", "29500"),
        ("DistNetworkError: (gai error: -5 - No address associated with hostname).", "gai error: -5"),
        ("curl: (6) Could not resolve host: hub.example", "hub.example"),
        (
            "/x/python3: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')",
            "a.b",
        ),
        ("/usr/bin/python3: can't find '__main__' module in '/x/tran'", "/x/tran"),
        ("/my env/bin/python: can't open file '/x/run.py/tran.py': [Errno 20] Not a directory", "tran.py"),
        ("bash: /my files/tran.sh: No such file or directory", "tran.sh"),
        ("sh: 0: cannot open /my files/tran.sh: No such file", "tran.sh"),
    ],
)
def test_a_cause_that_lies_in_no_node_gives_no_strike_and_is_the_reason(said: str, words: str) -> None:
    consequences = f"DistNetworkError: failed to recv, got 0 bytes\n{PEER}\n"
    for log in (f"{said}\n{consequences}{ENDED}", f"{said}\nsrun: error: n0: task 0: Exited with exit code 127\n"):
        assert blamed_nodes(log, [], ntasks=2) == blamed_nodes(log, [failure(1, "n1", PEER)], ntasks=2) == {}
        assert words in first_failure_text(log, [])
    assert words in first_failure_text(f"{said}\n", [])  # the time limit was over
    killed = f"{said}\nsrun: error: n1: task 1: Segmentation fault\n"
    assert blamed_nodes(killed, [], ntasks=2) == {"n1": "Segmentation fault"}
    later = f"{said}\nRuntimeError: CUDA error: uncorrectable ECC\nsrun: error: n1: task 1: Exited with exit code 1\n"
    assert blamed_nodes(later, [], ntasks=2) == {"n1": "Exited with exit code 1"}


@pytest.mark.parametrize(
    "sick", ["RuntimeError: CUDA error: uncorrectable ECC error", "OSError: [Errno 5] Input/output error: '/x/a.bin'"]
)
def test_a_port_that_was_taken_excuses_no_sick_node(sick: str) -> None:
    log = f"{sick}\nOSError: [Errno 98] Address already in use\nsrun: error: n1: task 1: Exited with exit code 1\n"
    assert blamed_nodes(log, [], ntasks=2) == {"n1": "Exited with exit code 1"}


@pytest.mark.parametrize("error", [LISTENING, "socket.gaierror: [Errno -2] Name or service not known"])
def test_what_a_rank_says_of_a_port_or_a_name_is_the_reason_and_no_strike(error: str) -> None:
    said = [failure(0, "n0", error), failure(1, "n1", PEER)]
    assert blamed_nodes(ENDED, said, ntasks=3) == {}
    assert first_failure_text(ENDED, said).startswith(f"rank 0 on n0: {error[:40]}")


def test_a_script_that_one_node_cannot_read_is_the_nodes_fault() -> None:
    log = "/venv/bin/python: can't open file '/x/train.py': [Errno 116] Stale file handle\n"
    log += f"srun: error: n1: task 1: Exited with exit code 2\n{TERMINATING}srun: error: n0: task 0: Terminated\n"
    assert blamed_nodes(log, [], ntasks=2) == {"n1": "Exited with exit code 2"}


def test_two_strikes_within_a_day_exclude_and_strikes_expire(tmp_path: Path) -> None:
    run = Run(tmp_path)
    record_node_failures(run, 1, {"n1": "Killed", "n2": "Killed"}, now=1000.0)
    assert worst_nodes(read_node_failures(run), nodes=2, now=1001.0) == []
    record_node_failures(run, 2, {"n1": "Killed"}, now=2000.0)
    assert worst_nodes(read_node_failures(run), nodes=2, now=2001.0) == ["n1"]
    assert worst_nodes(read_node_failures(run), nodes=2, now=1000.0 + 24 * 3600) == []


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (16, 1), (40, 2), (1000, 50)])
def test_at_most_a_twentieth_of_the_nodes_or_one_is_excluded(nodes: int, most: int) -> None:
    strikes = [NodeFailureRecord(node=f"n{n}", attempt=a, reason="", time=float(a)) for n in range(100) for a in (1, 2)]
    assert len(worst_nodes(strikes, nodes=nodes, now=3.0)) == most
