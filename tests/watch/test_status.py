from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from relayrun import cli, files
from relayrun.control.chain import excluded_nodes
from relayrun.control.rundir import evaluations, find_runs, triggers
from relayrun.control.rundir.evaluations import EvaluationResult, SubmittedEvaluation
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, CheckpointCommit, Heartbeat, RefusedConnections
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.errors import RunDirError
from relayrun.files import append_line
from relayrun.watch.status import queue, run_status, run_status_text, tables
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary
from relayrun.watch.text import json_text
from tests.accounted import make_accounted
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.history import began, make_history
from tests.plans import plan_with

NOW = 10_000.0
RUNNING = QueueStatus(jobs=[Job(id="8", name="j", state="RUNNING"), Job(id="9", name="j", state="PENDING")])


def begin(run: Run, number: int, *, base: int = 0, start: float = NOW - 600) -> None:
    attempt = run.attempt(number)
    attempt.heartbeats.mkdir(parents=True)
    began(run, number, base=base, job_id=str(number + 6), nodes="n[0-1]", start_time=start, job_end_time=start + 3600)


def steps(run: Run, number: int, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        append_line(
            run.attempt(number).metrics,
            {
                "iteration": iteration,
                "loss": 10.0 - iteration / 10,
                "tokens_per_second": 1000.0 * number,
                "time": NOW - 100 + iteration,
            },
            durable=False,
        )


def commit(run: Run, number: int, iteration: int, *, age: float) -> None:
    folder = run.checkpoint(iteration)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"12345")
    run.attempt(number).append_commit(
        CheckpointCommit(
            iteration=iteration,
            path=str(folder),
            consumed_samples=iteration,
            time=NOW - age,
            seconds=1.0,
            files={"data": 5},
        ),
    )


def end(run: Run, number: int, cause: str, reason: str, durable: int, *, progress: bool) -> None:
    AttemptEnd(
        attempt=number,
        cause=cause,
        reason=reason,
        exit_code=0,
        durable_iteration=durable,
        progress=progress,
        end_time=NOW - 500,
        action="stop" if cause in ("exit", "fatal", "cancelled") else "continue",
    ).write(run.attempt(number).end)


@pytest.fixture
def run(make_run: MakeRun) -> Run:  # noqa: F811
    """Attempt 1 trained 12 steps, saved 10 and crashed; attempt 2 began at 10 and is at 11."""
    made, _plan = make_run(total_steps=50)
    begin(made, 1, start=NOW - 1200)
    steps(made, 1, 1, 12)
    commit(made, 1, 10, age=900)
    end(made, 1, "failed", "node [n1] lost", 10, progress=True)
    begin(made, 2, base=10)
    return made


def test_an_attempt_whose_end_nobody_could_record_is_over_when_another_job_runs(run: Run) -> None:
    """A full disk: job 8 ended without a record, a person submitted again, and job 10 begins now."""
    run.attempt(2).heartbeats.mkdir(exist_ok=True)
    beat = Heartbeat(node="n0", iteration=11, phase="step", time=NOW - 500, step_p95=None, save_p95=None)
    beat.write(run.attempt(2).heartbeats / "n0.json")
    replace(Plan.load(run), submitted_after_attempt=2).write(run.plan)
    found = run_status.read_run_status(run, QueueStatus(jobs=[Job(id="10", name="j", state="RUNNING")]), now=NOW)
    assert found.failed_attempts == 0
    assert (found.state, found.phase, found.leave_time) == ("running", None, None)


def test_a_running_chain(run: Run) -> None:
    steps(run, 2, 11, 11)
    Heartbeat(node="n0", iteration=11, phase="step", time=NOW - 1, step_p95=1.0, save_p95=None).write(
        run.attempt(2).heartbeats / "n0.json"
    )
    for number, iteration in ((1, 5), (2, 11)):
        append_line(run.attempt(number).failed_saves, {"iteration": iteration, "error": "no space", "time": NOW})
    excluded_nodes.record_node_failures(run, 1, {"n1": "node failure"}, now=NOW - 700)
    excluded_nodes.record_node_failures(run, 2, {"n1": "node failure", "n0": "oom"}, now=NOW - 600)
    excluded_nodes.record_node_failures(run, 1, {"n2": "long ago"}, now=NOW - 90_000)
    triggers.touch_trigger(run, "save")
    found = run_status.read_run_status(run, RUNNING, now=NOW)
    assert (found.run, found.state, found.stop, found.scheduler_error) == ("test/chain", "running", None, None)
    assert [(job.id, job.state) for job in found.jobs] == [("8", "RUNNING"), ("9", "PENDING")]
    assert (found.failed_saves, found.last_failed_save) == (2, "iteration 11: no space")
    assert (found.attempt, found.job_id, found.nodes, found.phase) == (2, "8", "n[0-1]", "step")
    assert (found.leave_time, found.job_end_time) == (NOW - 600 + 3540, NOW - 600 + 3600)
    assert (found.iteration, found.total_steps, found.loss, found.tokens_per_second) == (11, 50, 8.9, 2000.0)
    assert (found.durable_iteration, found.durable_path, found.durable_age) == (10, str(run.checkpoint(10)), 900.0)
    assert (found.last_end_attempt, found.last_end) == (1, "failed: node [n1] lost")
    assert (found.failed_attempts, found.max_failed_attempts) == (0, 3)
    assert found.strikes == {"n1": 2, "n0": 1}
    assert found.excluded == ["n1"]
    assert [trigger.name for trigger in found.triggers] == ["save"]


def test_a_node_that_is_used_again_because_there_are_too_few_others(run: Run) -> None:
    excluded_nodes.record_node_failures(run, 1, {"n1": "node failure"}, now=NOW - 700, sick=True)
    found = run_status.read_run_status(run, RUNNING, now=NOW)
    assert (found.excluded, found.used_again) == (["n1"], ["n1"])
    text = dict(run_status_text._lines(found, NOW))["excluded"]
    assert text == "n1 (used again: there are too few others)"
    excluded_nodes.record_node_failures(
        run, 2, {"n1": "node failure"}, now=NOW - 100
    )  # in this attempt: the next job leaves it out
    assert run_status.read_run_status(run, RUNNING, now=NOW).used_again == []


def test_steps_beyond_the_base_of_the_next_attempt_do_not_count(run: Run) -> None:
    with open(run.attempt(2).metrics, "w") as file:
        file.write('{"iteration": 11, "lo')  # a torn line
    found = run_status.read_run_status(run, RUNNING, now=NOW)
    assert (found.iteration, found.loss, found.tokens_per_second) == (10, 9.0, 1000.0)


def test_a_slow_rank_is_named(run: Run) -> None:
    slow = {"rank": 3, "node": "n1", "section": "data", "ratio": 1.5, "seconds": 0.25}
    append_line(run.attempt(2).metrics, {"iteration": 21, "loss": 2.0, "time": NOW, "straggler": slow})
    words = "rank 3 on n1 takes 1.50 times as long as its peers, 250 ms a step more in data"
    assert run_status.read_run_status(run, RUNNING, now=NOW).straggler == words
    append_line(run.attempt(2).metrics, {"iteration": 22, "loss": 2.0, "time": NOW, "slowest_rank_ratio": 1.1})
    assert run_status.read_run_status(run, RUNNING, now=NOW).straggler is None


def test_connections_that_were_refused_are_a_field_and_a_line(run: Run) -> None:
    assert run_status.read_run_status(run, RUNNING, now=NOW).refused_connections is None
    refused = RefusedConnections(count=3, address="10.6.6.6", why="it does not answer the challenge", time=NOW)
    refused.write(run.attempt(2).refused_connections)
    found = run_status.read_run_status(run, RUNNING, now=NOW)
    assert refused.told in text_of(found)
    value = json.loads(json_text(asdict(found)))
    assert value["refused_connections"]["count"] == 3
    assert value["refused_connections"]["address"] == "10.6.6.6"


def test_only_the_end_of_long_metrics_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(run, 2, 11, 2000)
    assert run.attempt(2).metrics.stat().st_size > 2 * files.READ_BLOCK
    read: list[str] = []
    blocks = files._blocks_backwards

    def counted(fd: int, at: int) -> Iterator[tuple[int, bytes]]:
        for block in blocks(fd, at):
            read.append(os.readlink(f"/proc/self/fd/{fd}"))
            yield block

    monkeypatch.setattr(files, "_blocks_backwards", counted)
    assert run_status.read_run_status(run, RUNNING, now=NOW).iteration == 2000
    assert read.count(str(run.attempt(2).metrics)) == 1


def test_a_scheduler_that_does_not_answer_is_a_fact_like_others(run: Run) -> None:
    found = run_status.read_run_status(run, QueueStatus(error="squeue: Unable to contact slurm controller"), now=NOW)
    assert (found.state, found.jobs, found.iteration) == ("unknown", [], 10)
    assert "the scheduler did not answer: squeue: Unable" in text_of(found)


def test_a_run_that_nobody_goes_on_with_has_no_deadline_and_counts_its_open_attempt_as_failed(run: Run) -> None:
    found = run_status.read_run_status(run, QueueStatus(), now=NOW)
    assert (found.state, found.leave_time, found.failed_attempts) == ("failed", None, 1)


def test_a_stopped_run_says_why(run: Run) -> None:
    end(run, 2, "exit", "exit trigger by ann", 10, progress=False)
    run.stop.write_text("exit trigger by ann\n\nThe chain has ended.\n")
    found = run_status.read_run_status(run, QueueStatus(), now=NOW)
    assert (found.state, found.stop, found.last_end_attempt) == ("stopped", "exit trigger by ann", 2)
    assert found.stop_state == "stopped"  # a person wrote STOP: without a head
    assert found.phase is None


def test_torn_checkpoints_are_told(run: Run) -> None:
    (run.checkpoint(10) / "data").write_bytes(b"1")
    found = run_status.read_run_status(run, RUNNING, now=NOW)
    assert (found.durable_iteration, found.durable_age) == (None, None)
    assert "data has 1 bytes, not 5" in (found.durable_fault or "")
    assert "no checkpoint of this run is whole" in text_of(found)


def test_a_run_before_its_first_job(make_run: MakeRun) -> None:  # noqa: F811
    made, _plan = make_run()
    found = run_status.read_run_status(made, QueueStatus(jobs=[Job(id="1", name="j", state="PENDING")]), now=NOW)
    assert (found.state, found.attempt, found.iteration, found.loss, found.durable_iteration) == (
        "queued",
        None,
        0,
        None,
        0,
    )
    assert "none yet" in text_of(found)


def text_of(found: RunStatus) -> str:
    return run_status_text.run_status_table(found, now=NOW)


def test_text_keeps_brackets_and_json_is_whole(run: Run) -> None:
    append_line(run.attempt(2).metrics, {"iteration": 11, "loss": float("nan"), "time": NOW}, durable=False)
    found = run_status.read_run_status(run, RUNNING, now=NOW)
    text = text_of(found)
    assert "attempt 1: failed: node [n1] lost" in " ".join(text.split())
    assert "2, job 8 on n[0-1], begun 10 min ago" in text
    value = json.loads(json_text(asdict(found)), parse_constant=pytest.fail)
    assert value["loss"] is None
    assert value["jobs"][0]["state"] == "RUNNING"
    assert value["iteration"] == 11


DAMAGE = {
    "no plan": ("plan.json", None, "this is no run directory"),
    "torn plan": ("plan.json", "{", "unreadable record"),
    "plan of another kind": ("plan.json", '{"run": 1}', "unreadable record"),
    "plan is a list": ("plan.json", "[]", "unreadable record"),
    "torn begin": ("attempts/0002/begin.json", "", "unreadable record"),
    "wrong type in begin": (
        "attempts/0002/begin.json",
        '{"attempt": 2, "job_id": "8", "job_name": "j", "nodes": "n", '
        '"config_revision": 1, "base_iteration": "ten", "base_path": null, "start_time": 1, '
        '"job_end_time": null, "grace_period": 1}',
        "its records cannot be read",
    ),
    "commit without fields": ("attempts/0001/commits.jsonl", "{}\n", "its records cannot be read"),
    "strike without fields": ("nodes.jsonl", '{"node": "n"}\n', "its records cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_directory_is_one_clear_error(run: Run, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, content, message = DAMAGE[name]
    if content is None:
        (run.path / file).unlink()
    else:
        (run.path / file).write_text(content)
    assert cli.main(["status", str(run.path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_all_runs_are_a_line_each_the_newest_first(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(find_runs, "runs_folder", lambda: tmp_path)
    for name, start in (("older", NOW - 500), ("newer", NOW - 5)):
        made, plan = make_run(folder=f"tests/{name}")
        plan_with(plan, run=f"tests/{name}").write(made.plan)
        begin(made, 1, start=start)
    (tmp_path / "tests" / "half-made").mkdir()
    found = RunsWatcher().statuses(find_runs.all_run_folders(), now=NOW)
    assert [entry.run if isinstance(entry, RunStatus) else "damaged" for entry in found] == [
        "tests/newer",
        "tests/older",
        "damaged",
    ]
    assert isinstance(found[2], DamagedRun)
    assert cli.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["tests/newer", "failed"],
        ["tests/older", "failed"],
        ["tests/half-made", "damaged"],
    ]
    assert cli.main(["status", "tests/older", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "tests/older")
    assert cli.main(["status", "--json"]) == 0
    assert [entry.get("error") for entry in json.loads(capsys.readouterr().out)][2].startswith("this is no run")


def test_a_glance_says_of_every_run_what_a_whole_look_says(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A run that never began, one with a long past, one that has ended, one that runs, and one that is damaged."""
    fresh, _ = make_run(folder="fresh", scheduler="local")
    past = make_history(tmp_path / "past", lines=200, attempts=9)
    for number in range(1, 10):
        end = past.attempt(number).read_end()
        assert end is not None
        replace(end, end_time=end.end_time + 10 * number).write(past.attempt(number).end)
    stopped = make_history(tmp_path / "stopped", lines=60, attempts=2)
    stopped.stop.write_text("done: 60 steps\n")
    cut = make_history(tmp_path / "cut", lines=60, attempts=3)
    cut.attempt(3).end.unlink()
    torn = make_history(tmp_path / "torn", lines=60, attempts=3)
    torn.plan.write_text("{")
    runs = [fresh, past, stopped, cut, torn]
    whole, brief = RunsWatcher().statuses(runs, now=NOW), RunsWatcher().summaries(runs, now=NOW)
    assert [type(entry) for entry in brief] == [RunSummary] * 4 + [DamagedRun]
    for one, other in zip(brief, whole, strict=True):
        assert {name: getattr(other, name) for name in vars(one)} == vars(one)
    assert len(tables.runs_table(brief).splitlines()) == 1 + 5
    left = [entry.remaining for entry in brief if isinstance(entry, RunSummary) and entry.path == str(past.path)]
    assert left[0] is not None
    assert left[0].attempts == 5


def test_a_glance_opens_few_files_of_a_run_whatever_its_age(tmp_path: Path) -> None:
    """Its cost with a thousand runs is the files that it opens."""
    runs = [make_history(tmp_path / str(attempts), lines=300, attempts=attempts) for attempts in (10, 60)]
    program = (
        "import sys; from pathlib import Path; from relayrun.watch.status.runs import RunsWatcher; "
        "from relayrun.control.rundir.run import Run; run = Run(Path(sys.argv[1])); opened = []\n"
        "sys.addaudithook(lambda event, details: event == 'open' and opened.append(str(details[0])))\n"
        "RunsWatcher().summaries([run], now=0.0)\n"
        "print(sum(path.startswith(sys.argv[1]) for path in opened))"
    )
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", program, run.path], capture_output=True, check=True, timeout=600
            ).stdout
        )
        for run in runs
    ]
    assert counts[0] == counts[1] <= 25


def test_once_slurm_does_not_answer_it_is_not_asked_for_every_run(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [make_run(folder=f"run{number}", scheduler="slurm")[0] for number in range(3)]
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\necho x >> '{tmp_path}/count'; echo Unable to contact slurm controller >&2; exit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    found = RunsWatcher().statuses(made, now=NOW)
    assert [entry.state for entry in found if isinstance(entry, RunStatus)] == ["unknown"] * 3
    assert (tmp_path / "count").read_text().count("x") == 1


@pytest.mark.parametrize("verb", ["status", "save", "stop"])
def test_a_run_that_is_not_there_is_one_clear_error(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, str(tmp_path / "nothing")]) == 1
    assert "there is no such run" in capsys.readouterr().err


def test_find_prefers_what_is_a_run(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _plan = make_run(folder="run")
    monkeypatch.setattr(find_runs, "runs_folder", lambda: tmp_path)
    assert find_runs.find_run(str(made.path)) == made
    assert find_runs.find_run("run").path == made.path
    with pytest.raises(RunDirError, match="this is no run directory"):
        find_runs.find_run(str(tmp_path))


def test_status_does_not_import_torch(run: Run) -> None:
    code = (
        f"import sys; from relayrun import cli; cli.main(['status', {str(run.path)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("False\n")


def test_evaluations_done_failed_and_on_their_way(run: Run) -> None:
    for iteration in (4, 6, 8, 10):
        folder = evaluations.evaluation_dir(run, iteration, 1)
        folder.path.mkdir(parents=True)
        SubmittedEvaluation(job_id=str(100 + iteration), time=NOW).write(folder.submitted)
    done = EvaluationResult(
        iteration=4, attempt=1, status="done", time=NOW, results={"arc": {"acc": 0.25, "acc_stderr": 0.1}}
    )
    evaluations.record_result(run, done)
    evaluations.record_result(
        run, EvaluationResult(iteration=6, attempt=1, status="failed", time=NOW, error="no such task")
    )
    answer = replace(RUNNING, evaluations={"108": "running"})
    text = dict(run_status_text._lines(run_status.read_run_status(run, answer, now=NOW), NOW))["evaluations"]
    assert text == (
        "iteration 4: arc acc 0.25; 1 done; 1 failed, the last of iteration 6: no such task; "
        "no result yet: iteration 8 (job 108, running), iteration 10 (job 110)"
    )
    local = queue.query_queue(run)  # the local scheduler never heard of them
    assert local.evaluations == {"108": "gone", "110": "gone"}


def test_a_wide_letter_takes_two_columns(tmp_path: Path) -> None:
    run = make_accounted(tmp_path / "run", name="p/[bold]名前", scheduler="local")
    found = [
        run_status.read_run_status(run, QueueStatus(), now=time.time()),
        DamagedRun(path="/runs/p/torn", error="plan.json: no JSON"),
    ]
    _, first, second = tables.runs_table(found).splitlines()
    assert first.startswith("p/[bold]名前  failed ")
    assert second.startswith("p/torn        damaged ")


def test_a_wrong_option_is_told_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command makes its own parser alone; what goes wrong is said as if it had made them all."""
    for arguments in (["status", "--bogus"], ["--bogus", "status"], ["bogus"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        told = capsys.readouterr().err
        assert "bogus" in told
        assert "usage: relayrun [-h] [--version] COMMAND" in told
    assert cli.parse(["status", "--json", "RUN"]).names == ["RUN"]


def test_the_budget_and_what_the_run_needs_of_it(
    make_run: MakeRun,  # noqa: F811
) -> None:
    run, plan = make_run(total_steps=300, nodes=2, max_node_hours=10.0)
    now = time.time()
    begin(run, 1, start=now - 5400)
    commit(run, 1, 100, age=NOW - now + 3600)
    end = AttemptEnd.of(
        {"attempt": 1, "cause": "saved", "reason": "", "exit_code": 0, "end_time": now - 1800, "durable_iteration": 100}
        | {"progress": True, "action": "continue"}
    )
    end.write(run.attempt(1).end)
    status = run_status.read_run_status(run, QueueStatus(), now=now, plan=plan)
    assert (status.budget.setting, status.budget.left) == ("max_node_hours", pytest.approx(8))
    (line,) = [
        line for line in run_status_text.run_status_table(status, now=now).splitlines() if line.startswith("budget")
    ]
    words = "2.00 of chain.max_node_hours 10 are used; 8.00 node hours are left, and the run needs about 4.00"
    assert line.split(maxsplit=1)[1] == words
    priced = plan_with(plan, cost_per_node_hour=3.0, currency="CHF")
    shown = run_status_text.run_status_table(
        run_status.read_run_status(run, QueueStatus(), now=now, plan=priced), now=now
    )
    assert "8.00 node hours are left (24.00 CHF), and the run needs about 4.00 (12.00 CHF)" in shown
    assert " node hours (12.00 CHF), at the pace of one attempt" in shown
    running = run_status.read_run_status(run, RUNNING, now=now, plan=plan)
    assert "; over at " in run_status_text.run_status_table(running, now=now)
    assert main_json(running)["budget"]["time"] == pytest.approx(now + 4 * 3600)
    without = run_status.read_run_status(run, RUNNING, now=now, plan=plan_with(plan, max_node_hours=None))
    assert main_json(without)["budget"]["time"] is None
    assert "\nbudget" not in run_status_text.run_status_table(without, now=now)


def main_json(status: RunStatus) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = json.loads(json_text(asdict(status)))
    return found
