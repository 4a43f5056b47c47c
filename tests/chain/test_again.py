"""What the batch script does itself, in Bash: its log, `begin` beside it, and `again` where the supervisor fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.chain import __main__ as program
from relayrun.control.chain import job_script, supervisor
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, read_stop, stop_reason
from relayrun.control.scheduler import base
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import LocalQueue

from .conftest import ROOT, MakeRun, fast_package


def chain(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run it to its end, with short delays between tries."""
    monkeypatch.setattr("relayrun.control.scheduler.local.BEGIN_BACKOFF", 0.2)
    events: list[str] = []
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(events.append)
    return events


def refusing_python(folder: Path, verb: str, *, times: int) -> str:
    """A host Python that cannot start the supervisor's `verb` the first `times` times."""
    python, count = folder / "python", folder / "count"
    python.write_text(
        f"#!/bin/bash\nset -e\n"
        f'if [[ " $* " == *" relayrun.control.chain {verb} "* ]]; then\n'
        f'  echo x >>"{count}"\n'
        f'  [[ "$(wc -l <"{count}")" -gt {times} ]] || {{ echo "No module named relayrun" >&2; exit 1; }}\n'
        f'fi\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


@pytest.mark.slow
def test_a_begin_that_cannot_start_is_tried_again_later_each_time(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run("--steps=5", total_steps=5, host_python=refusing_python(tmp_path, "begin", times=2))
    events = chain(run, plan, monkeypatch)
    assert [event for event in events if "queued again" in event] == ["job 1 ended: FAILED and is queued again"] * 2
    assert (stop_reason(run) or "").startswith("the last iteration, 5, is saved")
    assert LocalQueue(run.path / "local").read_job("1").failed_begins == 0  # forgotten once it has begun


@pytest.mark.slow
def test_a_begin_that_never_starts_ends_the_chain_with_a_reason(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run(host_python=refusing_python(tmp_path, "begin", times=99))
    events = chain(run, plan, monkeypatch)
    assert len([event for event in events if "queued again" in event]) == base.MAX_FAILED_BEGINS - 1
    assert (stop_reason(run) or "").startswith(f"the supervisor failed in job 1, {base.MAX_FAILED_BEGINS} times")


@pytest.mark.slow
@pytest.mark.long
def test_a_job_that_ends_before_its_start_is_on_record_is_queued_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalScheduler, "_recorded", lambda self, job: False)
    run, plan = make_run("--steps=5", total_steps=5, host_python=refusing_python(tmp_path, "begin", times=2))
    events = chain(run, plan, monkeypatch)
    assert [event for event in events if "queued again" in event] == ["job 1 ended: FAILED and is queued again"] * 2
    assert (stop_reason(run) or "").startswith("the last iteration, 5, is saved")


@pytest.mark.slow
def test_without_auto_requeue_a_begin_that_cannot_start_is_not_tried_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run(auto_requeue=False, host_python=refusing_python(tmp_path, "begin", times=99))
    events = chain(run, plan, monkeypatch)
    assert not [event for event in events if "queued again" in event]
    assert (stop_reason(run) or "").startswith("begin failed in job 1 on ")
    assert run.stop.read_text().startswith("state: failed\nreason: begin failed in job 1 on ")


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 99])
def test_an_end_that_fails_is_called_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    run, plan = make_run(
        "--steps=5",
        total_steps=5,
        host_python=refusing_python(tmp_path, "end", times=times),
        package_root=str(fast_package(tmp_path)),
    )
    chain(run, plan, monkeypatch)
    assert (stop_reason(run) or "").startswith("the last iteration, 5, is saved")
    assert [record.cause for number in run.attempt_numbers() if (record := run.attempt(number).read_end())] == ["done"]


@pytest.mark.slow
def test_a_watch_that_is_killed_starts_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run(
        "--stop-rank=1",
        "--stop-at=2",
        max_failed_attempts=1,
        hang_timeout=4,
        host_python=refusing_python(tmp_path, "watch", times=1),
        package_root=str(fast_package(tmp_path)),
    )
    chain(run, plan, monkeypatch)
    assert [record.cause for number in run.attempt_numbers() if (record := run.attempt(number).read_end())] == ["hang"]


@pytest.mark.slow
def test_a_batch_script_that_cannot_read_its_package_is_tried_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run("--steps=3", total_steps=3, package_root=str(tmp_path / "root"))

    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    monkeypatch.setattr("relayrun.control.scheduler.local.BEGIN_BACKOFF", 0.2)
    events: list[str] = []

    def listen(event: str) -> None:
        events.append(event)
        if "queued again" in event and not (tmp_path / "root").exists():
            fast_package(tmp_path)

    scheduler.run_queue(listen)
    assert [event for event in events if "queued again" in event] == ["job 1 ended: FAILED and is queued again"]
    assert (stop_reason(run) or "").startswith("the last iteration, 3, is saved")


@pytest.mark.slow
def test_a_begin_that_hangs_until_the_job_is_about_to_end_is_tried_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not answer: the signal before the time limit must be heard all the same."""
    here, python = tmp_path / "here", tmp_path / "python"
    hang = f'[[ " $* " != *" begin "* || -e "{here}" ]] || {{ touch "{here}"; sleep 1000; }}'
    python.write_text(f'#!/bin/bash\n{hang}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    run, plan = make_run("--steps=3", total_steps=3, time_limit=600, host_python=str(python))
    monkeypatch.setattr("relayrun.control.scheduler.local.BEGIN_BACKOFF", 0.2)
    scheduler, signalled = LocalScheduler(run), tmp_path / "signalled"
    scheduler.submit(plan, run.job_script, options={})
    events: list[str] = []

    def signal_once() -> None:
        if here.exists() and not signalled.exists():
            pid = LocalQueue(run.path / "local").read_job("1").pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR2)
            signalled.touch()

    scheduler.run_queue(events.append, signal_once)
    assert [event for event in events if "queued again" in event] == ["job 1 ended: FAILED and is queued again"]
    assert "begin, which was not done at SIGUSR2, failed in job 1" in logs(tmp_path)
    assert (stop_reason(run) or "").startswith("the last iteration, 3, is saved")


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "logs").glob("*.err")))


@pytest.mark.parametrize("text", ["again.sh", "log.sh"])
def test_the_job_script_has_what_it_needs_when_the_package_is_away(make_run: MakeRun, text: str) -> None:
    run, _plan = make_run()
    assert (ROOT / "launchers/lib" / text).read_text().partition("\n")[2] in run.job_script.read_text()
    subprocess.run(["bash", "-n", run.job_script], check=True)


def test_the_defaults_for_jobs_of_earlier_versions_are_the_schedulers() -> None:
    text = (ROOT / "launchers/lib/job.sh").read_text()
    assert f"RELAYRUN_MAX_FAILED_BEGINS:={base.MAX_FAILED_BEGINS}}}" in text
    assert f"RELAYRUN_BEGIN_BACKOFF:={base.BEGIN_BACKOFF}}}" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [("printf 'a  b\\n'", 0, "a  b\n"), ("bash -c 'echo no; exit 7'", 7, "no\n"), ("sleep 100", 124, "")],
)
def test_what_touches_a_file_may_hang_and_does_not_hold_the_script(command: str, code: int, said: str) -> None:
    again, seconds = ROOT / "launchers/lib/again.sh", 1 if code == 124 else 60
    program = (
        f'set -euo pipefail; source "{again}"; trap - EXIT; said="$(within {seconds} {command}; echo "$?.")" || true'
    )
    done = subprocess.run(
        ["bash", "-c", program + '; printf %s "${said}"'], stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    assert done.stdout == f"{said}{code}."


@pytest.mark.parametrize(
    "away",
    ["nothing", "the folder", "the run directory too", pytest.param("the folder, for ever", marks=pytest.mark.long)],
)
def test_a_job_has_a_log_though_its_log_folder_is_away(make_run: MakeRun, tmp_path: Path, away: str) -> None:
    """Slurm would not start a script whose output file it cannot open."""
    run, plan = make_run()
    logs, node = Path(plan.log_folder), tmp_path / "node"
    name = f"{plan.job_name}-7"
    node.mkdir()
    head = (text := run.job_script.read_text())[: text.index("within 600")]
    if away == "the folder, for ever":
        head = head.replace("within 60 appendable", "within 5 appendable")
        logs.mkdir()
        os.mkfifo(logs / f"{name}.out")  # whoever opens it waits for a reader
    elif away != "nothing":
        logs.write_text("no folder")
    if away == "the run directory too":
        head = head.replace(f"RUN_DIR={run.path}", f"RUN_DIR={logs}/run")
    script = tmp_path / "script"
    script.write_text(head + "echo out\necho err >&2\ntrap - EXIT\n")
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3", "TMPDIR": str(node)}
    with (tmp_path / "said").open("wb") as said_before:
        for _ in range(2):  # a requeued job goes on with its log
            subprocess.run(
                ["bash", script], env=environment, stdout=said_before, stderr=said_before, check=True, timeout=600
            )
    assert (tmp_path / "said").read_bytes() == b""
    if away == "the folder, for ever":
        os.close(os.open(logs / f"{name}.out", os.O_RDONLY | os.O_NONBLOCK))  # who waits for it may go
    folder = {"nothing": logs, "the run directory too": node}.get(away, run.path)
    assert (folder / f"{name}.out").read_text() == "out\nout\n"
    said = (folder / f"{name}.err").read_text()
    assert said.count("err\n") == 2
    assert (f"this log is in {folder} of n3" in said) == (away != "nothing")
    if away == "the folder, for ever":
        assert f"{logs}: no answer within 60 s" in said
    elif away != "nothing":
        assert "Not a directory" in said or "File exists" in said


SLURM_COMMANDS = """#!/bin/bash
folder="{folder}"
echo "${{0##*/}} $*" >>"$folder/asked"
[[ -z "${{SQUEUE_STATES:-}}" ]] || echo "${{0##*/}}" >>"$folder/misled"
case "${{0##*/}} $*" in
  squeue*RestartCnt)
    if [[ -e "$folder/preempted.case" || (-e "$folder/slow-kill.case" && -e "$folder/orders") ]]; then
      echo "1                   "
    else
      echo "0                   "
    fi ;;
  squeue*%k*) cat "$folder/comment" 2>/dev/null ;;
  squeue*-fallback*) [[ ! -e "$folder/refused-with-fallback.case" ]] || echo 9 ;;
  squeue*PENDING*)
    [[ -e "$folder/answers" ]] || exit 1
    cat "$folder/pending" 2>/dev/null ;;
  squeue*%x*) [[ ! -e "$folder/comment" ]] || echo "n[1,7]" ;;
  squeue*--jobs=8*) cat "$folder/successor" 2>/dev/null ;;
  squeue*%T*) cat "$folder/state" ;;
  sbatch*" --exclude=n[1,7] --nodes=3 "*) [[ -e "$folder/tried-before-spare.case" ]] || exit 1 ;;
  sbatch*" --exclude=n7 --nodes=4 "*) ;;
  sbatch*--nodes=4*) exit 1 ;;
  sbatch*--exclude=n0*--nodes=3*) [[ -e "$folder/spare.case" ]] || exit 1 ;;
  sbatch*--exclude*) exit 1 ;;
  sbatch*--nodes=3*) [[ -e "$folder/spare-is-down.case" ]] || exit 1 ;;
  sbatch*) exit 1 ;;
  "scontrol show hostnames n[1,7]") printf 'n1\nn7\n' ;;
  "scontrol show"*) ;;
  scontrol*)
    while read -r order; do
      [[ ! -e "$folder/refused.case" && ! -e "$folder/refused-with-fallback.case" ]] || exit 1
      echo "$order" >>"$folder/orders"
      case "$order" in
        *Comment=*) sed "s/.*Comment=//; s/ .*//" <<<"$order" >"$folder/comment" ;;
        requeue*) kill -TERM $$ $PPID ;; # as Slurm does, to every process of a job that it queues again
      esac
    done ;;
esac
exit 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "alone",
        "successor",
        "cancelled",
        "cancelled-successor",
        "silent",
        "limit",
        "slow-kill",
        "preempted",
        "refused",
        "refused-with-fallback",
        "stopped",
        "exit-trigger",
        "spare",
        "spare-is-down",
        "too-few",
        "tried-before",
        "tried-before-spare",
    ],
)
def test_again_asks_before_it_queues(make_run: MakeRun, tmp_path: Path, what: str) -> None:
    """Slurm may be silent for a while, a person may act meanwhile, and Slurm brings back what it is told to.

    Or it lets nobody change a job: then tries are not counted, and the job must not come back for ever.
    """
    run, plan = make_run()
    tried_before = what.startswith("tried-before")
    if what in ("spare", "spare-is-down", "too-few") or tried_before:  # of three nodes and a spare one, two tasks each
        plan = replace(plan, nodes=3, spare_nodes=1, ntasks_per_node=2)
        run.job_script.write_text(job_script.job_script(plan, run))
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("squeue", "scontrol", "sbatch", "sleep"):
        text = SLURM_COMMANDS.format(folder=folder)
        if what in ("slow-kill", "refused", "refused-with-fallback") and name == "sleep":
            text = "#!/bin/bash\n"  # Slurm leaves the script for longer than it sleeps
        elif name == "sleep":  # the second question is answered; and nothing comes after an order but the end
            text = f'#!/bin/bash\ntouch "{folder}/answers"\n[[ ! -e "{folder}/orders" ]] || kill -KILL $PPID\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    # as Slurm 22.05 says it
    states = {"cancelled": "COMPLETING 9:57", "preempted": "COMPLETING 9:57", "limit": "COMPLETING INVALID"}
    (folder / "state").write_text(states.get(what, "RUNNING 0:57"))
    if what != "silent":
        (folder / "answers").touch()
    (folder / f"{what}.case").touch()
    if tried_before:  # n1, and n7 is left out by a person; without n0 and n1 there are too few
        (folder / "comment").write_text("relayrun:begin-failed=1@n1\n")
    if what == "stopped":  # a person has ended the chain, on a disk that took no STOP
        (folder / "comment").write_text("relayrun:stopped-by=ada\n")
    if what == "exit-trigger":
        (run.triggers / "exit").touch()
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    if what == "successor":
        (folder / "pending").write_text("8\n")
    if what == "cancelled-successor":
        (attempt / "successor.json").write_text('{\n  "job_id": "8",\n  "cancelled": false\n}\n')
        (folder / "successor").write_text("CANCELLED")
    script = run.job_script.read_text()
    script = script[: script.index('[[ -n "${relayrun_log_is_open')] + f'attempt_dir="{attempt}"\nexit 9\n'
    (tmp_path / "script").write_text(script)
    done = subprocess.run(
        ["bash", tmp_path / "script"],
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "n0",
            "SQUEUE_STATES": "RUNNING",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    orders = (folder / "orders").read_text() if (folder / "orders").exists() else ""
    if what in ("alone", "silent", "limit", "slow-kill", "spare", "spare-is-down", "too-few") or tried_before:
        assert orders.count("requeue 7") == 1
        assert "requeue 7" in orders, done.stderr
        assert ("begin-failed=2@n1,n0" if tried_before else "begin-failed=1@n0") in orders
        assert ("StartTime=now+60" if tried_before else "StartTime=now+30") in orders
    else:
        assert "requeue" not in orders
    assert ("update JobId=7 NumNodes=3-4 NumTasks=6\n" in orders) == ("spare" in what)
    assert ("update JobId=7 NumNodes=4-4 NumTasks=8\n" in orders) == (what == "tried-before")
    assert ("ExcNodeList=n0\n" in orders) == (what == "spare")
    assert ("ExcNodeList=n7\n" in orders) == (what == "tried-before")
    assert set((folder / "misled").read_text().split() if (folder / "misled").exists() else ()) == set()
    assert ("the fallback job 9 goes on" in done.stderr) == (what == "refused-with-fallback")
    reasons = {
        "cancelled": "while Slurm ended the job",
        "cancelled-successor": "the successor, job 8, was cancelled",
        "refused": "and Slurm does not queue the job again",
        "stopped": "stopped by ada",
        "exit-trigger": "exit trigger, and the batch script failed in job 7",
    }
    assert reasons.get(what, "") in (stop_reason(run) or "")
    ended = read_stop(run)
    assert (ended is not None) == (what in reasons)
    assert ended is None or ended.state == ("failed" if what == "refused" else "stopped")


def test_watch_is_started_again_though_its_log_is_full(tmp_path: Path) -> None:
    script = (ROOT / "launchers/lib/job.sh").read_text()
    begin = script.index("\nkeep_watching() {")
    count = tmp_path / "count"
    lines = [
        "set -euo pipefail",
        "attempt=1 hang_seconds=60",
        "switches() { :; }",
        "sleep() { :; }",
        f'supervisor() {{ echo >>"{count}"; [[ "$(wc -l <"{count}")" -ge 3 ]]; }}',
        script[begin : script.index("\n}\n", begin) + 2],
        "keep_watching 2>/dev/full",
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], timeout=300)
    assert (done.returncode, len(count.read_text())) == (0, 3)


STAND_IN = """#!/bin/bash
case "${0##*/} $*" in
  "sbatch "*) exit 0 ;;
  *"show job"*) echo "JobId=7 JobName=x Restarts=9 PreemptTime=1 Restarts=0" ;; # a name like these fields is no field
  *RestartCnt) if [[ -e requeued ]]; then echo 1; else echo 0; fi ;;
  *"--format=%T %L") echo "RUNNING 1:00" ;;
  *"--format=%x") echo "(null)" ;;
  *"--format=%k") [[ ! -e comment ]] || cat comment ;;
  "scontrol ") while read -r line; do
    echo "${line}" >>orders
    [[ "${line}" != requeue* ]] || touch requeued
    [[ "${line}" != *Comment=* ]] || { line="${line#*Comment=}"; echo "${line%% *}" >comment; }
  done ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "ordered"),
    [
        (1, "update JobId=7 StartTime=now+30 Comment=relayrun:begin-failed=1@n3 ExcNodeList=n3"),
        (28, "update JobId=7 StartTime=now+600 Comment=relayrun:begin-failed=1@"),
    ],
)
def test_a_full_disk_is_no_nodes_fault_and_no_storm_of_jobs(tmp_path: Path, code: int, ordered: str) -> None:
    for name in ("squeue", "scontrol", "sbatch"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    names = {"RUN_DIR": "/r", "JOB_NAME": "j", "AUTO_REQUEUE": "true", "MAX_FAILED_BEGINS": "6", "BEGIN_BACKOFF": "30"}
    environment = os.environ | {f"RELAYRUN_{name}": value for name, value in names.items()}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3"}
    command = ["bash", "-c", f'source "$1"; again begin {code}', "job", str(ROOT / "launchers/lib/again.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (tmp_path / "orders").read_text().splitlines()[-1] == ordered
    assert ("the disk of /r is full" in done.stderr) == (code == 28)


def test_begin_on_a_full_disk_says_so_by_its_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, code in ((errno.ENOSPC, 28), (errno.EDQUOT, 28), (errno.EIO, None)):

        def refuse(_run: Run, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(supervisor, "begin_attempt", refuse)
        monkeypatch.setattr(sys, "argv", ["chain", "begin", "--run-dir", str(run.path)])
        if code is None:
            with pytest.raises(OSError, match="Input/output"):
                program.main()
        else:
            assert program.main() == code
            assert os.strerror(number) in capsys.readouterr().err
