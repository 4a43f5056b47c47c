"""The real batch script and its processes, one of whose calls of the system fails: `strace -e inject`.

Where `test_exhaustion.py` fails the calls of the supervisor, here the first job as a whole runs below strace: Bash, the
supervisor's programs, the task starter and the ranks. In each process the n-th call of one kind fails, or kills it.
"""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.local import LocalScheduler

from .conftest import MakeRun, fast_package
from .test_exhaustion import EVERYTHING, todays

CASES = 200
STEPS = 4
SECONDS = 600.0
"""A chain that has not ended by then runs for ever."""

NOT_MADE, TURNS = "no process made that call", 5
"""A busy machine may write all metrics at once, and then nothing of their view is cut off. So often it is tried."""

CALLS = {
    "openat": 200,
    "write": 9,
    "fsync": 10,
    "rename": 5,
    "mkdir": 8,
    "unlink": 5,
    "newfstatat": 750,
    "getdents64": 36,
    "vfork,clone,clone3": 6,
    "execve": 7,
    "ftruncate": 1,
    "pwrite64": 2,
    "readlink": 5,
    "flock": 4,
}
"""Kinds of calls, and up to the how-manieth of a process they fail: some process of an undisturbed job makes more."""
ERRORS = {"vfork,clone,clone3": ["EAGAIN", "ENOMEM"], "execve": ["EACCES", "ENOENT"]}
KILLING = ("fsync", "rename", "mkdir", "pwrite64")
"""Calls that Bash does not make: nothing but Slurm itself outlives a killed batch script, and here is none."""


def case(number: int) -> str:
    """The argument of `strace -e` of one case, always the same."""
    chosen = random.Random(number)
    calls = chosen.choice(list(CALLS))
    at = chosen.randint(1, CALLS[calls])
    errors = ERRORS.get(calls, ["ENOSPC", "EIO", "ESTALE", "EACCES"])
    what = chosen.choice([f"error={error}" for error in errors] + ["signal=KILL"] * (calls in KILLING))
    return f"inject={calls}:{what}:when={at}"


@pytest.mark.slow
@EVERYTHING
def test_a_chain_whose_first_job_meets_a_failing_call_ends_with_a_word(
    everything: bool, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayrun.control.scheduler.local.BEGIN_BACKOFF", 0.1)
    root = fast_package(tmp_path)
    numbers = range(CASES) if everything else range(todays(50), CASES, 50)
    wrong = []
    for number in numbers:
        for turn in range(TURNS):
            complaint = below_strace(number, make_run, root, turn)
            if complaint != NOT_MADE:
                break
        print(number, case(number), complaint or "well", flush=True)
        if complaint:
            wrong.append(f"{number} {case(number)}: {complaint}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(numbers)}", *wrong])


def below_strace(number: int, make_run: MakeRun, root: Path, turn: int) -> str:
    """Run one case; what is wrong with it, or nothing."""
    run, plan = make_run(
        f"--steps={STEPS}",
        "--step-seconds=0.01",
        folder=f"run{number}-{turn}",
        total_steps=STEPS,
        package_root=str(root),
    )
    real = run.job_script.rename(run.path / "real.sbatch")
    wanted, trace = case(number), run.path / "trace"
    # with a filter in the kernel strace is fast, and injects no signal
    fast = "--seccomp-bpf" if "error=" in wanted else ""
    strace = f"strace -f -qq {fast} -o {trace} -e trace={wanted.split('=')[1].split(':')[0]} -e {wanted}"
    run.job_script.write_text(
        f'#!/bin/bash\nif [[ ! -e "{run.path}/once" ]]; then\n  touch "{run.path}/once"\n'
        f'  exec {strace} bash "{real}"\nfi\nexec bash "{real}"\n'
    )
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    limit = time.monotonic() + SECONDS

    def hurry() -> None:
        if time.monotonic() > limit:
            raise TimeoutError
        for path in (run.path / "local").glob("job-*.json"):
            job = json.loads(path.read_text())
            if job["state"] == "PENDING" and job["eligible_time"] > time.time() + 1:
                path.write_text(json.dumps(job | {"eligible_time": 0}))

    try:
        scheduler.run_queue(lambda _event: None, hurry)
    except TimeoutError:
        return f"it runs for ever\n{log(run)}"
    text = trace.read_text(errors="replace")
    if "(INJECTED)" not in text and not re.search(r"\) += \?$", text, re.M):
        return NOT_MADE
    reason = stop_reason(run)
    if reason is None:
        return f"it ended without a word\n{log(run)}"
    if not reason.startswith("the last iteration"):
        # before a rank has trained, what no rank could start and what this user may not do are not tried again
        certain = "execve" in wanted or "EACCES" in wanted
        return "" if certain and reason.startswith("fatal: ") else f"STOP: {reason}\n{log(run)}"
    counted = [line["iteration"] for line in map(json.loads, run.metrics_view.read_text().splitlines())]
    return "" if counted == sorted(set(counted)) else f"iterations {counted}"


def log(run: Run) -> str:
    """The last lines of the run's logs."""
    texts = [path.read_text(errors="replace")[-800:] for path in sorted((run.path.parent / "logs").glob("*.err"))]
    return re.sub(r"^", "    ", "\n--\n".join(texts[-2:]), flags=re.M)
