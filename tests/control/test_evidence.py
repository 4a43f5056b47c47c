"""What the logs and the ranks' own words say of an attempt's end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.chain import failure_reason
from relayrun.control.chain.failure_reason import FailureReason, fatal_reason, first_failure_text, log_excerpt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, RankFailure
from relayrun.control.rundir.run import Run
from tests.history import began, history_plan

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:26077"
TRACEBACK = """Traceback (most recent call last):
  File "loop.py", line 9, in train
    boom()
KeyError: 'layout'
"""


def failure(rank: int, error: str, *, time: float = 1.0, repeats: bool = False) -> RankFailure:
    return RankFailure(rank=rank, node=f"n{rank}", error=error, time=time, repeats=repeats)


def test_sixty_lines_of_srun_do_not_push_the_traceback_out() -> None:
    log = "/venv/x.py:3: UserWarning: no apex\n  warnings.warn(\n" + TRACEBACK
    log += "".join(f"srun: error: n{node}: task {node}: Exited with exit code 1\n" for node in range(60))
    shown = log_excerpt(log).splitlines()
    assert shown[:4] == TRACEBACK.splitlines()
    assert len(shown) <= failure_reason.EXCERPT_LINES
    assert shown[4] == "srun: error: n0: task 0: Exited with exit code 1"


def test_lines_of_slurm_with_a_time_before_them_push_nothing_out_either() -> None:
    """Since Slurm 25.05 slurmstepd writes a time in the place of its name."""
    ends = "".join(f"[2026-11-26T12:02:04.086] error: *** STEP 7.0 ON n{n} CANCELLED AT 2026 ***\n" for n in range(60))
    shown = log_excerpt(f"{ends}hello\n").splitlines()
    assert len(shown) == failure_reason.SCHEDULER_LINES + 1
    assert shown[-1] == "hello"


def test_a_long_traceback_keeps_its_first_and_its_last_line() -> None:
    frames = "".join(f'  File "loop.py", line {line}, in train\n    step()\n' for line in range(100))
    log = f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n" + "later\n" * 50
    shown = log_excerpt(log).splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert "RecursionError: too deep" in shown
    assert len(shown) <= failure_reason.EXCERPT_LINES


def test_of_chained_tracebacks_the_last_error_is_kept() -> None:
    frames = "".join(f'  File "loop.py", line {line}, in train\n    step()\n' for line in range(20))
    log = (
        f"Traceback (most recent call last):\n{frames}OSError: disk\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\nTraceback (most recent call last):\n{frames}ValueError: the cause\n"
    )
    assert "ValueError: the cause" in log_excerpt(log).splitlines()


def test_an_error_without_a_traceback_is_found_before_what_srun_says_of_it() -> None:
    lines = [f"srun: error: n{node}: task {node}: Exited with exit code 127" for node in range(60)]
    log = "\n".join(["hello", "/bin/bash: line 1: /no/python: No such file or directory", *lines])
    assert log_excerpt(log).splitlines()[0] == "/bin/bash: line 1: /no/python: No such file or directory"
    assert log_excerpt("a\nerror: the disk is full\nb\n").splitlines()[0] == "error: the disk is full"


def test_a_log_without_any_error_shows_its_last_lines() -> None:
    assert log_excerpt("".join(f"line {n}\n" for n in range(100))).splitlines()[-1] == "line 99"
    assert len(log_excerpt("".join(f"line {n}\n" for n in range(100))).splitlines()) == failure_reason.EXCERPT_LINES


def test_the_words_of_the_rank_that_failed_first_are_the_reason() -> None:
    log = "srun: error: n1: task 1: Exited with exit code 1\n"
    said = [failure(0, PEER, time=1.0), failure(1, "RuntimeError: ECC", time=2.0)]
    assert first_failure_text(log, said) == "rank 1 on n1: RuntimeError: ECC"
    assert first_failure_text("srun: error: n1: task 1: Killed\n", said[:1]) == "task 1 on n1: Killed"
    assert first_failure_text("", said[:1]) == ""


def fatal(log: str, failures: list[RankFailure], **changes: object) -> str | None:
    facts: dict[str, object] = {"exit_code": 1, "ntasks": 2, "began": False, "worked_before": False, "program": "py"}
    return fatal_reason(log, failures, **(facts | changes))  # type: ignore[arg-type]


def test_an_error_that_would_come_again_is_fatal_whichever_rank_had_it() -> None:
    said = [failure(0, PEER), failure(1, "KeyError: 'layout'", time=2.0, repeats=True)]
    assert fatal("", said) == "rank 1 on n1: KeyError: 'layout'"
    assert fatal("", [failure(0, "RuntimeError: CUDA"), failure(1, "KeyError: 'x'", time=2.0, repeats=True)]) is None
    assert fatal("", said[:1]) is None


def test_a_program_that_no_rank_could_start_is_fatal() -> None:
    log = "srun: error: n0: task 0: Exited with exit code 127\nsrun: error: n1: task 1: Exited with exit code 127\n"
    reason = fatal(log, [], exit_code=127)
    assert reason is not None
    assert "py" in reason
    assert "exit code 127" in reason
    assert "cluster.python" in reason
    assert fatal("", [], exit_code=126) is not None  # the local scheduler


def test_a_script_that_is_not_there_is_told_and_not_the_program_that_is_to_run_it() -> None:
    log = "bash: tran.sh: No such file or directory\nsrun: error: n0: task 0: Exited with exit code 127\n"
    assert fatal(log, [], exit_code=127, ntasks=1) == "bash: tran.sh: No such file or directory"


def test_a_program_that_one_node_could_not_start_may_be_the_nodes_fault() -> None:
    log = "srun: error: n1: task 1: Exited with exit code 127\nsrun: error: n0: task 0: Terminated\n"
    assert fatal(log, [], exit_code=143) is None
    assert fatal(log, [], exit_code=127) is None
    both = "srun: error: n[0-1]: tasks 0-1: Exited with exit code 127\n"
    assert fatal(both, [], exit_code=127, worked_before=True) is None  # it was there: a file system may be away
    assert fatal(both, [], exit_code=127, began=True) is None


def test_a_module_that_every_rank_lacks_is_fatal_unless_it_was_there_before() -> None:
    said = [failure(rank, "ModuleNotFoundError: No module named 'torch'") for rank in range(2)]
    assert fatal("", said) == "every rank: ModuleNotFoundError: No module named 'torch'"
    assert fatal("", said, worked_before=True) is None
    assert fatal("", said[:1]) is None
    assert fatal("", [failure(rank, "FileNotFoundError: data.bin") for rank in range(2)]) is None


ASSERTION = (
    'Traceback (most recent call last):\n  File "init.py", line 9, in f\nAssertionError: Megatron requires CUDA.\n'
)
ARGPARSE = "usage: pretrain_gpt.py\npretrain_gpt.py: error: unrecognized arguments: --num-layerz 3\n"


def test_causes_that_come_again_stop_the_chain_unless_one_of_several_nodes_reports_them() -> None:
    assert fatal(ASSERTION, [], nodes=1) == "AssertionError: Megatron requires CUDA. (init.py:9)"
    assert fatal(ASSERTION, [], nodes=2) is None
    assert fatal(ASSERTION * 2, [], nodes=2) is not None
    assert fatal(ASSERTION, [], nodes=1, worked_before=True) is None
    assert fatal(ASSERTION, [], nodes=1, began=True) is None
    assert "--num-layerz" in (fatal(ARGPARSE, [], nodes=8) or "")
    for passing in (
        "socket.gaierror: [Errno -2] Name or service not known",
        "OSError: [Errno 28] No space left on device",
    ):
        assert fatal(f"{passing}\n" * 2, [], nodes=1) is None


def end_of(run: Run, plan: Plan, number: int, error: str) -> FailureReason:
    log = run.path / f"job-{number}.err"
    log.write_text(error)
    attempt, started = run.attempt(number), began(run, number, log=str(log))
    failed = failure_reason.why_failed(run, plan, attempt, started, 1)
    end = AttemptEnd(
        attempt=number,
        cause="failed",
        reason=failed.words,
        exit_code=1,
        durable_iteration=0,
        progress=False,
        end_time=1.0,
        action="retry",
        failure_key="" if failed.said is None else failed.said.key,
    )
    end.write(attempt.end)
    return failed


def test_the_same_error_at_the_same_place_in_two_attempts_is_seen(tmp_path: Path) -> None:
    run = Run(tmp_path)
    plan = replace(history_plan(run, total_steps=10), trainer="command", trainer_settings={"run": ["true"]})
    assert not end_of(run, plan, 1, TRACEBACK).same
    assert end_of(run, plan, 2, TRACEBACK).same
    assert not end_of(run, plan, 3, TRACEBACK.replace("line 9", "line 10")).same
    again = "socket.gaierror: [Errno -2] Name or service not known\n"
    assert not any(end_of(run, plan, number, again).same for number in (4, 5))


def test_a_node_that_is_found_unfit_does_not_end_the_chain_whatever_words_it_is_told_in() -> None:
    """`Permission denied` alone comes again; a look at the node says that another may be well."""
    words = "UnhealthyNode: ranks cannot train on n0: cannot be written: /tmp: Permission denied"
    assert fatal("", [failure(0, words)], ntasks=1, nodes=1) is None
    assert fatal("", [failure(0, "PermissionError: [Errno 13] Permission denied: 'x'")], ntasks=1, nodes=1) is not None


HOOK = "hook my.probes:Boom, after_step: RuntimeError: boom at 7 (/team/my/probes.py, line 6)"


@pytest.mark.parametrize(
    ("error", "log"),
    [
        (f"HookFailed: {HOOK}", f"error: {HOOK}\n"),
        (f"HookFailed: {HOOK.replace('boom', 'boom ' * 200)}", ""),
        ("NotFound: x\nat y", TRACEBACK.replace("KeyError: 'layout'", "mylib.store.NotFound: x\nat y")),
    ],
    ids=["hook", "long", "qualified"],
)
def test_the_place_of_an_error_that_a_rank_recorded_is_seen(tmp_path: Path, error: str, log: str) -> None:
    run = Run(tmp_path)
    plan = replace(history_plan(run, total_steps=10), trainer="command", trainer_settings={"run": ["true"]})
    for number in (1, 2):
        record = run.attempt(number).failures / "rank-0000.json"
        record.parent.mkdir(parents=True)
        failure(0, error.replace("at 7", f"at {number}")).write(record)
        assert end_of(run, plan, number, log).same == (number == 2)
    moved = error.replace("line 6", "line 7")
    record = run.attempt(3).failures / "rank-0000.json"
    record.parent.mkdir(parents=True)
    failure(0, moved).write(record)
    assert end_of(run, plan, 3, log.replace("line 9", "line 10")).same is False
