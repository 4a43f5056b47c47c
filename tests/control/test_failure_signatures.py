"""Each entry of the table of failures has a real log, and none claims a log that is not its own."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.sections.chain import ChainSection, FailureSignature
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control import diagnosis, failure_signatures
from relayrun.control.chain import failure_reason
from relayrun.control.diagnosis import find_statements, first_cause
from relayrun.control.failure_signatures import SignatureTable, classify, signatures
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.error_lines import blamed_nodes

LOGS = [
    part.partition("\n")
    for part in re.split(r"^== ", (Path(__file__).parent / "failure_logs.txt").read_text(), flags=re.M)[1:]
]
OWN = FailureSignature(
    name="licence", pattern="LICENCE SERVER", cause="network", again=False, meaning="no licence", advice="lmstat -a"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/x/loop.py", line 9, in train\n    boom()\n'


@pytest.mark.parametrize(("head", "_", "log"), LOGS, ids=[head for head, _, _ in LOGS])
def test_a_real_log_has_its_cause(head: str, _: str, log: str) -> None:
    found = first_cause(log)
    assert ("unknown" if found is None or found.secondary else found.name) == head.partition(" | ")[0]


def test_every_entry_has_a_real_log() -> None:
    known = {head.partition(" | ")[0] for head, _, _ in LOGS}
    assert [each.name for _, each in signatures() if each.name not in known] == []
    assert all(each.meaning and each.advice for _, each in signatures())


def short_literals(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the patterns that need too little text, with their entry: 6 bytes in any line, 5 in a last word."""
    return [
        (each["name"], pattern)
        for each in entries
        if each["name"] not in failure_signatures.GENERAL
        for pattern in each["patterns"]
        if len(failure_signatures._literal(pattern).encode()) < (6 if "any_line" in each else 5)
    ]


def claims_of(lines: str) -> list[tuple[str, str]]:
    """Return the lines that mean a failure, with their entry."""
    return [(said.name, line) for line in lines.splitlines() for said in find_statements(line)]


def test_no_entry_claims_ordinary_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = failure_signatures._TABLE["entries"]
    ordinary = (Path(__file__).parent / "ordinary_lines.txt").read_text()
    assert short_literals(entries) == []
    assert claims_of(ordinary) == []
    short = {"name": "short", "cause": "node", "any_line": True, "meaning": "m", "patterns": ["\\bECC\\b"]}
    monkeypatch.setitem(failure_signatures._TABLE, "entries", [short, *entries])
    monkeypatch.setattr(diagnosis, "_TROUBLE", ("",))
    monkeypatch.setattr(diagnosis, "WARNINGS", ("short",))
    failure_signatures.signatures.cache_clear()
    try:
        assert short_literals([short]) == [("short", "\\bECC\\b")]
        assert {name for name, _ in claims_of(ordinary)} == {"short"}
    finally:
        failure_signatures.signatures.cache_clear()


def test_the_text_that_a_pattern_needs_is_one_text() -> None:
    """A pattern with alternatives outside a group needs none of them, and would be left out of every log."""
    patterns = [each.pattern for each, _ in signatures()]
    assert [pattern for pattern in patterns if "|" in failure_signatures._literal(pattern)] == []


def test_a_thread_that_cannot_start_is_a_limit_and_no_abort() -> None:
    ended = "terminate called after throwing an instance of 'std::system_error'\n"
    found = first_cause(f"{ended}  what():  Resource temporarily unavailable\n")
    assert found is not None
    assert (found.name, found.cause) == ("processes", "configuration")


def test_the_fast_look_passes_over_no_line_of_a_real_log(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [find_statements(log) for _, _, log in LOGS]
    monkeypatch.setattr(diagnosis, "_TROUBLE", ("",))
    monkeypatch.setattr(SignatureTable, "of_lines", lambda _, more: SignatureTable(more))
    assert [find_statements(log) for _, _, log in LOGS] == found


def test_a_line_has_the_entry_whose_pattern_it_is_the_first_to_match() -> None:
    """`classify` searches for a pattern's text before it tries the pattern."""
    lines = {line for _, _, log in LOGS for line in log.splitlines()}
    by_pattern = {line: next((each for found, each in signatures() if found.search(line)), None) for line in lines}
    assert {line: classify(line) for line in lines} == by_pattern
    assert len({each.name for each in by_pattern.values() if each is not None}) > 50


def test_a_missing_entry_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [each for each in failure_signatures._TABLE["entries"] if each["name"] != "disk-full"]
    monkeypatch.setitem(failure_signatures._TABLE, "entries", entries)
    failure_signatures.signatures.cache_clear()
    try:
        wrong = [head for head, _, log in LOGS if (said := first_cause(log)) is None or said.name not in head]
        assert any(head.startswith("disk-full") for head in wrong)
    finally:
        failure_signatures.signatures.cache_clear()


def test_entries_of_a_site_or_a_run_come_first_and_count_in_any_line() -> None:
    log = f"INFO LICENCE SERVER does not answer\n{TRACEBACK}KeyError: 'x'\n"
    assert first_cause(log) is not None
    assert classify("ModuleNotFoundError: LICENCE SERVER", [OWN]) is OWN
    found = first_cause("INFO LICENCE SERVER does not answer\n", [OWN])
    assert found is not None
    assert (found.name, found.cause) == ("licence", "network")


def test_signatures_of_a_plan_are_checked_to_the_leaf() -> None:
    values = {"failure_signatures": [{"name": "a", "pattern": "b+", "cause": "node", "again": True, "meaning": "c"}]}
    (found,) = read_section(ChainSection, values, "chain").failure_signatures
    assert found == FailureSignature(name="a", pattern="b+", cause="node", again=True, meaning="c")
    entry = values["failure_signatures"][0]
    for wrong in ({"pattern": "("}, {"pattern": ".*"}, {"cause": "me"}, {"again": "yes"}, {"name": "a\nb"}):
        with pytest.raises(ValueError, match=r"chain.failure_signatures\[0\]"):
            read_section(ChainSection, {"failure_signatures": [entry | wrong]}, "chain")


def test_the_place_of_a_traceback_makes_two_failures_the_same() -> None:
    one = first_cause(f"{TRACEBACK}KeyError: 17\n")
    other = first_cause(
        f"[rank3]: {TRACEBACK}KeyError: 18\n".replace("\n ", "\n[rank3]:  ").replace("\nK", "\n[rank3]: K")
    )
    assert one is not None
    assert other is not None
    assert one.key == other.key == "KeyError at loop.py:9"
    assert (one.rank, other.rank) == (None, 3)
    assert replace(one, place="").key == "KeyError: #"


def test_a_pattern_that_would_search_for_hours_costs_a_second_and_counts_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site's own pattern ends no job's `end`, nor a plan of another user a look at his run."""
    monkeypatch.setattr(failure_signatures, "PATTERN_SECONDS", 0.2)
    slow = FailureSignature(name="slow", pattern=r"(a+)+$", cause="node", meaning="slow")
    quick = FailureSignature(name="quick", pattern=r"^a+b", cause="node", meaning="quick")
    began = time.process_time()
    found = [failure_signatures.classify("a" * 60 + "b", (slow, quick)) for _ in range(20)]
    assert time.process_time() - began < 2
    assert found == [quick] * 20
    assert caplog.text.count("its pattern is too slow") == 1


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("NameError: name 'x' is not defined", "program"),
        ("KeyError: 'tokens'", "program"),
        ("ZeroDivisionError: division by zero", "program"),
        ("ValueError: odd", "unknown"),
        ("RuntimeError: odd", "unknown"),
        ("AssertionError", "unknown"),
        ("OSError: odd", "unknown"),
        ("mylib.errors.Odd: odd", "unknown"),
    ],
)
def test_an_exception_is_the_programs_only_if_its_kind_says_so(words: str, cause: str) -> None:
    found = first_cause(f"{TRACEBACK}{words}\n")
    assert found is not None
    assert (found.cause, found.words) == (cause, words)


LIMIT = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-27T06:00:18 DUE TO TIME LIMIT ***\n"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
ENDED = [
    f"{TRACEBACK}EOFError\n",
    f"{TRACEBACK}RuntimeError: odd\n",
    f"{TRACEBACK}torch.distributed.elastic.multiprocessing.api.SignalException: Process 8 got signal: 15\n",
    "[rank3]: RuntimeError: NCCL communicator was aborted on rank 3.\n",
]


@pytest.mark.parametrize("words", ENDED)
def test_slurms_word_for_an_end_comes_before_what_ranks_say_in_any_order(words: str) -> None:
    for log in (LIMIT + words, words + LIMIT, LIMIT + TRACEBACK + MEMORY):
        found = first_cause(log)
        assert found is not None
        assert found.name == "time-limit", log
    for earlier, name in ((MEMORY, "gpu-memory"), ("KeyError: 'x'\n", "exception")):
        found = first_cause(f"{TRACEBACK}{earlier}{words}{LIMIT}")
        assert found is not None
        assert found.name == name


def test_a_gpu_that_fell_off_the_bus_before_the_time_limit_is_the_nodes() -> None:
    found = first_cause(f"NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n{LIMIT}")
    assert found is not None
    assert found.name == "gpu-lost"


def test_an_abort_of_one_task_strikes_no_node_and_a_crash_does() -> None:
    end = "srun: error: n1: task 1: {}\nsrun: Terminating StepId=7.0\nsrun: error: n0: task 0: Terminated\n"
    assert blamed_nodes(end.format("Aborted (core dumped)"), [], ntasks=2) == {}
    assert blamed_nodes(end.format("Segmentation fault"), [], ntasks=2) == {"n1": "Segmentation fault"}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("OUT_OF_MEMORY", "host-memory"),
        ("TIMEOUT", "time-limit"),
        ("DEADLINE", "time-limit"),
        ("NODE_FAIL", "node-failure"),
        ("BOOT_FAIL", "node-failure"),
        ("PREEMPTED", "preempted"),
        ("FAILED", None),
        ("COMPLETED", None),
        ("CANCELLED by 1000", None),
    ],
)
def test_slurms_state_of_a_job_names_a_cause_or_none(state: str, name: str | None) -> None:
    found = classify(f"job 5123: {state}")
    assert (found and found.name) == name


CHECKED = f"{TRACEBACK}PreflightRejected: n2 slot 5 trained down to x4\n"
MUNGE = "srun: error: Munge decode failed: Rewound credential\n"


@pytest.mark.parametrize(("words", "nodes"), [(CHECKED, {"n2"}), (MUNGE, set()), (CHECKED.replace("n2", "x"), set())])
def test_the_node_that_the_words_name_is_blamed_and_not_the_one_that_says_so(words: str, nodes: set[str]) -> None:
    ends = "srun: error: n0: task 0: Exited with exit code 65\nsrun: error: n[1-3]: tasks 1-3: Terminated\n"
    assert set(blamed_nodes(words + ends, [], ntasks=4)) == nodes


def test_an_exception_that_others_raise_from_it_is_the_cause_with_labels_and_times() -> None:
    label = "3: 2026-11-27 06:00:18 [rank3]: "
    lines = f"{TRACEBACK}zlib.error: Error -3 while decompressing data\nThe above exception was the direct cause of"
    log = f"{lines} the following exception:\n{TRACEBACK}mylib.LoaderFailed: no further batch".splitlines()
    found = first_cause("\n".join(label + line for line in log))
    assert found is not None
    assert (found.name, found.rank) == ("data-damaged", 3)
    assert first_cause("fatal: not a git repository\n" + TRACEBACK + "KeyError: 'x'\n").name == "exception"  # type: ignore[union-attr]


IN_USE = "torch.distributed.DistNetworkError: port: 25238, useIpv6: false, code: -98, name: EADDRINUSE"


@pytest.mark.parametrize(
    ("words", "again"), [("RuntimeError: odd", True), ("OSError: [Errno 28]", False), (IN_USE, False)]
)
def test_the_same_unknown_error_at_the_same_line_twice_ends_the_chain(tmp_path: Path, words: str, again: bool) -> None:
    run, said = Run(tmp_path), first_cause(f"{TRACEBACK}{words}\n")
    assert said is not None
    run.attempt(1).path.mkdir(parents=True)
    end = AttemptEnd(
        attempt=1,
        cause="failed",
        reason=words,
        exit_code=1,
        durable_iteration=0,
        progress=False,
        end_time=1.0,
        action="retry",
        failure_key=said.key,
    )
    end.write(run.attempt(1).end)
    assert failure_reason._came_again(run, [1], said) == again


def test_an_advice_is_true_after_the_end_of_the_chain() -> None:
    """STOP, `status` and notices repeat it when no further job comes."""
    advices = {known.name: known.advice for _, known in signatures()}
    assert not {name: text for name, text in advices.items() if "nothing" in text or "next job takes" in text}
    for name in ("port", "preempted", "node-failure", "stale-handle"):
        assert "relayrun resume" in advices[name], name


INTERLEAVED = """\
n1: Traceback (most recent call last):
n2: Exception ignored in: <function Client.__del__ at 0x7f>
n2: Traceback (most recent call last):
n1:   File "/x/load.py", line 4, in read
n2:   File "/x/client.py", line 8, in __del__
n2: AttributeError: 'Client' object has no attribute 'socket'
n1: KeyError: 'tokens'
"""


OTHERS = "".join(
    "Traceback (most recent call last):\n"
    + '  File "/x/loop.py", line 9, in step\n' * 20
    + f"RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:{number}\n"
    for number in range(60)
)


def labelled(log: str, label: str = "[rank{0}]: ") -> str:
    """Each traceback with the rank that wrote it."""
    parts = re.split(r"(?m)^(?=Traceback)", log)
    return "".join(label.format(rank) + line for rank, part in enumerate(parts) for line in part.splitlines(True))


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (INTERLEAVED, "KeyError: 'tokens' (load.py:4)"),
        (f"{TRACEBACK}KeyError: 'tokens'\n{OTHERS}", "KeyError: 'tokens'"),
        (labelled(f"{TRACEBACK}KeyError: 'tokens'\n{OTHERS}"), "KeyError: 'tokens'"),
        (labelled(f"{TRACEBACK}KeyError: 'tokens'\n{OTHERS}", "{0}: [rank{0}]: "), "KeyError: 'tokens'"),
        (f"{TRACEBACK}RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for w: 3\n", "GPT: size"),
        (f"{TRACEBACK}DistBackendError: NCCL error in: x.cpp:1\nLast error:\nno plugin\n", "x.cpp:1 no plugin"),
        ("x.sh: line 3: nvidia-smi: command not found\n" + TRACEBACK + "KeyError: 'a'\n", "KeyError: 'a'"),
        ("x.sh: line 3: conda: command not found\n" + TRACEBACK + "ModuleNotFoundError: No module\n", "conda"),
    ],
    ids=["hosts", "ranks", "ranks-labelled", "ranks-of-srun", "colon", "last-error", "passed-over", "environment"],
)
def test_words_are_quoted_whole_and_from_the_line_that_explains_the_others(log: str, words: str) -> None:
    found = first_cause(log)
    assert found is not None
    assert words in found.text


@pytest.mark.parametrize(
    "line",
    [
        "WARNING retry {}: Connection reset by peer while reading, trying again\n",
        "n1:1234:1300 [0] NCCL INFO Channel {} : 0 1 2 3 via P2P, error-free\n",
    ],
    ids=["retry", "nccl"],
)
def test_a_megabyte_of_lines_that_look_like_errors_costs_less_than_a_second(line: str) -> None:
    """`why` reads eight megabytes of the logs of all ranks line by line."""
    log = "".join(line.format(number) for number in range(2**20 // len(line)))
    began = time.process_time()
    found = first_cause(f"{log}{TRACEBACK}KeyError: 'a'\n")
    assert time.process_time() - began < 0.8
    assert found is not None
    assert found.text == "KeyError: 'a' (loop.py:9)"


THREAD = f"[rank3]: Exception in thread Thread-7 (read):\n{TRACEBACK}OSError: [Errno 116] Stale file handle\n".replace(
    "\n", "\n[rank3]: "
)
STEPS = "".join(f"[rank0]: step {number} loss 2.1\n" for number in range(40))
TIMEOUT = "[rank0]: [E1 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6)\n"


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (f"{THREAD}\n{STEPS}{TIMEOUT}", "stale-handle"),
        (f"{THREAD}\n{STEPS}{TIMEOUT}srun: error: n1: task 0: Aborted (core dumped)\n", "stale-handle"),
        (f"{THREAD}\n{STEPS}{TRACEBACK}KeyError: 'x'\n{TIMEOUT}", "exception"),
        (f"{THREAD}\n{STEPS}", None),
        (f"{TRACEBACK}OSError: [Errno 116] Stale file handle\n{STEPS}{TIMEOUT}", ""),
    ],
    ids=["timeout", "abort", "own-words", "went-on", "no-thread"],
)
@pytest.mark.parametrize("of", ["Exception in thread Thread-7 (read):", "Process ForkProcess-3:"])
def test_an_exception_of_a_thread_is_the_cause_of_ranks_that_waited_for_it(log: str, name: str | None, of: str) -> None:
    """The program goes on until it needs the work of the thread or the worker process."""
    found = first_cause(log.replace("Exception in thread Thread-7 (read):", of))
    assert (found and ("" if found.secondary else found.name)) == (name or None)


CHAIN = "\nThe above exception was the direct cause of the following exception:\n\n"
FRAMES = "jax.errors.SimplifiedTraceback: For simplicity, JAX has removed its internal frames\n"
PEER = "[rank1]: DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error\n"
HUB = "OSError: We couldn't connect to 'https://huggingface.co' to load this file\n"


@pytest.mark.parametrize(
    ("log", "name", "words"),
    [
        (f"{TRACEBACK}{FRAMES}{CHAIN}{TRACEBACK}XlaRuntimeError: INTERNAL: odd\n", "unlisted", "INTERNAL: odd"),
        (f"Memory access fault by GPU node-6\n{PEER}[rank1]: Last error:\n[rank1]: NET/OFI failed\n", None, "fault by"),
        (f"{PEER}[rank1]: Last error:\n[rank1]: NET/OFI failed\n", "infiniband", "NET/OFI failed"),
        (f"{TRACEBACK}OSError: [Errno 101] Network is unreachable\n{CHAIN}{TRACEBACK}{HUB}", "hub", "[Errno 101]"),
        ("x.sh: line 3: shard: unbound variable\n", "syntax", "shard"),
        (f"{TRACEBACK}ValueError: sample 7 has 1,023 tokens, expected 4,097\n", "sizes", "1,023"),
        (f"{TRACEBACK}AssertionError: expected 8 experts but got 16\n", "sizes", "but got 16"),
        (f"{TRACEBACK}ValueError: expected a name but got 16\n", "unlisted", "a name"),
        (f"mce: [Hardware Error]: CPU 9: Machine Check Exception: 5 Bank 8\n{TRACEBACK}OSError: x\n", None, "Bank 8"),
        (f"mce: [Hardware Error]: Machine check events logged\n{TRACEBACK}OSError: x\n", None, "OSError: x"),
        (f"nfs: server nas not responding, timed out\n{TRACEBACK}OSError: x\n", "file-server-lost", "nas"),
        (f"nfs: server nas not responding, still trying\n{TRACEBACK}OSError: x\n", "unlisted", "OSError: x"),
        ("The InfiniBand retry count between two MPI processes has been\nexceeded.\n", "infiniband", "retry count"),
        (f"HW Exception by GPU node-4 (Agent handle: 0x1) reason :GPU Hang\n{PEER}", "gpu-error", "GPU Hang"),
        ("x.sh: line 3: SHARD_DIR: unbound variable\n", "variable", "SHARD_DIR"),
        (f"nvcc fatal   : Unsupported gpu architecture 'sm_9'\n{TRACEBACK}ImportError: x.so\n", None, "nvcc fatal"),
    ],
)
def test_the_words_that_others_follow_from_are_quoted(log: str, name: str | None, words: str) -> None:
    found = first_cause(log)
    assert found is not None
    assert words in found.text
    assert name in (None, found.name)


def test_an_exception_that_names_an_option_refuses_a_setting() -> None:
    found = first_cause(f"{TRACEBACK}ValueError: set --ntasks-per-node=4 instead\n")
    assert found is not None
    assert (found.name, found.cause) == ("settings", "configuration")
