"""Ways out of a chain: decisions as tables, staged run directories, real jobs, and the fallback job on Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from relayrun.control.rundir.plan import Plan
from tests.history import make_history
from tests.plans import plan_with

from . import decisions, local_jobs, staged
from .masks import masked_values, write_json, write_text
from .plans import SUPERVISOR, stable, variants
from .slurm_commands import SlurmCommands

VARYING = {
    "durable_iteration": "N",
    "iteration": "N",
    "base_iteration": "N",
    "consumed_samples": "N",
}
"""Numbers of records that depend on how fast the machine is."""


def keep_staged(run_dir: Path, out: Path, folder: Path) -> None:
    """Write STOP, what was said, and the records of attempts behind the first, which was there before."""
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if path.is_file() and (
            name in ("STOP", "said.txt") or re.match(r"attempts/000[2-9]/(?!surroundings)\w+\.json|triggers/", name)
        ):
            text = stable(path.read_text(encoding="utf-8"), run_dir, {"FOLDER": folder})
            write_text(out / name, _timeless(text))


def keep_jobs(run_dir: Path, out: Path, folder: Path) -> None:
    """Write STOP, the events, and how the attempts ended, one after the other."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(run_dir.glob("attempts/*/end.json"))]
    ends = [masked_values(record, {**VARYING, "end_time": "TIME", "attempt": "N"}) for record in records]
    for name in ("STOP", "said.txt"):
        if (run_dir / name).exists():
            text = stable((run_dir / name).read_text(encoding="utf-8"), run_dir, {"FOLDER": folder})
            write_text(out / name, _timeless(_reason(text) if name == "STOP" else text))
    write_json(out / "ends.json", [_plain(each) for each, _ in groupby(ends)])


def _plain(record: Any) -> Any:
    return {name: _timeless(value) if isinstance(value, str) else value for name, value in record.items()}


def _reason(stop: str) -> str:
    """STOP without the last lines of the log, which are those of several processes."""
    return re.sub(r"\nThe last lines of its log:\n.*", "", stop, flags=re.S)


def _timeless(text: str) -> str:
    text = re.sub(r"\[relayrun [^]]*\]", "[relayrun TIME]", text)
    text = re.sub(r"\w+(?=\.__init__\(\))", "RECORD", text)
    # the recorder's own standard error, which may be a file
    text = re.sub(r'(?<="log": )(null|".*")', "LOG", re.sub(r'(?<=_offset": )\d+', "N", text))
    return re.sub(r"no progress for \d+ s", "no progress for N s", text)


FALLBACK = {
    "goes_on": {"state": "FAILED", "comment": "relayrun:starts-only-if-job=50-fails,failed-begins=0"},
    "goes_on_later": {"state": "NODE_FAIL", "comment": "relayrun:starts-only-if-job=50-fails,failed-begins=3"},
    "was_tried_often_enough": {"state": "FAILED", "comment": "relayrun:starts-only-if-job=50-fails,failed-begins=5"},
    "was_cancelled": {"state": "CANCELLED", "comment": "relayrun:starts-only-if-job=50-fails,failed-begins=0"},
}
"""What Slurm says of the job that a fallback job stands behind, and of the fallback job itself."""


def fallback(name: str, folder: Path) -> Path:
    """Start the fallback job of a run on Slurm; `said.txt` gets what it did. Returns the run directory."""
    run = make_history(folder / "run", lines=30, attempts=1)
    plan = plan_with(Plan.load(run), scheduler="slurm", fallback_job=True)
    plan.write(run.plan)
    slurm = SlurmCommands(folder / "slurm")
    done = subprocess.run(
        [sys.executable, "-P", "-m", SUPERVISOR, "fallback", f"--run-dir={run.path}"],
        env=slurm.environment(inside=True, name=plan.job_name, **FALLBACK[name]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = f"exit status {done.returncode}\n{done.stdout}{done.stderr}{slurm.calls()}"
    (run.path / "said.txt").write_text(said, encoding="utf-8")
    return run.path


def record(folder: Path) -> None:
    """Write all ways out."""
    for table in (decisions.begins, decisions.ends, decisions.others):
        write_text(folder / "decisions" / f"{table.__name__}.txt", "\n".join(table()) + "\n")
    for name in staged.STAGES:
        with tempfile.TemporaryDirectory(prefix="record-stage-") as place:
            keep_staged(staged.play(name, Path(place)).path, folder / "staged" / name, Path(place))
    for name in FALLBACK:
        with tempfile.TemporaryDirectory(prefix="record-fallback-") as place:
            keep_staged(fallback(name, Path(place)), folder / "fallback" / name, Path(place))
    with tempfile.TemporaryDirectory(prefix="record-config-") as space:
        config = variants(Path(space))["local"]
        for name in local_jobs.CASES:
            with tempfile.TemporaryDirectory(prefix="record-jobs-") as place:
                keep_jobs(local_jobs.play(name, config, Path(place)).path, folder / "jobs" / name, Path(place))
