"""A run that 0.2.0 began goes on with the present code, to the losses that 0.2.0 itself had.

`python -m tests.package.test_upgrade` writes the archive of the present version, for the release after it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

import relayrun
from relayrun.cli import main
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.trust import folder_identity
from tests import warm
from tests.workspace import Workspace, ends

ROOT = Path(__file__).resolve().parents[2]
ARCHIVES = Path(__file__).parent / "runs"
MODEL = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1}
SAVED, STEPS = 4, 8
LEFT_OUT = ("debug", "heartbeat", "secret", "quota.json")
"""What no later job reads: facts of the machine that wrote the archive, and the secret of an attempt that is over."""


def run_config(workspace: Workspace, folder: str, stop_after: int | None) -> Path:
    training = {"steps": STEPS, "stop_after": stop_after, "seq_length": 32}
    checkpoint = {"interval": 2, "keep_last": 1}
    return workspace.config(folder, model=MODEL, training=training, checkpoint=checkpoint, job={"ntasks_per_node": 1})


def places_of(workspace: Workspace) -> dict[str, str]:
    """Paths that differ between two machines, by their names in an archive."""
    return {"@DATA@": str(workspace.folder), "@PYTHON@": warm.python(), "@CODE@": str(ROOT)}


def record(archive: Path) -> None:
    """Write the archive of a run that stopped at half of its steps, with the losses of the same run in one piece."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "w:xz", preset=9) as made:
        workspace = Workspace.make(Path(folder))
        for name, stop_after in (("run", SAVED), ("whole", None)):
            submit = [sys.executable, "launchers/submit.py", str(run_config(workspace, name, stop_after))]
            subprocess.run(submit, cwd=ROOT, check=True, timeout=900)
        wanted = [path for path in sorted((workspace.folder / "run").rglob("*")) if not {*path.parts} & {*LEFT_OUT}]
        for path in [*wanted, workspace.folder / "whole/metrics.jsonl"]:
            if not path.is_file() or path.suffix in (".lock", ".pid"):
                continue
            data = path.read_bytes()
            for mark, place in places_of(workspace).items() if b"\0" not in data else ():
                data = data.replace(place.encode(), mark.encode())
            entry = tarfile.TarInfo(str(path.relative_to(workspace.folder)))
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))


def unpack(archive: Path, workspace: Workspace) -> Run:
    """Lay the run out as if it had been written here: places and the identity of its folder are this machine's."""
    with tarfile.open(archive) as packed:
        packed.extractall(workspace.folder, filter="data")
    run = workspace.run("run")
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for mark, place in places_of(workspace).items() if b"\0" not in data else ():
            data = data.replace(mark.encode(), place.encode())
        path.write_bytes(data)
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps(plan | {"directory": folder_identity(run.path)}))
    return run


def losses(metrics: Path) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in read_json_lines(metrics) if "loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("archive", sorted(ARCHIVES.glob("*.tar.xz")), ids=lambda path: path.name[:5])
def test_a_run_of_an_earlier_version_goes_on(archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert archive.stat().st_size < 200_000
    run = unpack(archive, Workspace.make(tmp_path))
    for command in ("status", "why", "report", "goodput", "config"):
        words = ["--text"] if command == "report" else []
        assert main([command, str(run.path), *words]) == 0, command
    assert f"iteration {SAVED} is saved" in capfd.readouterr().out
    assert main(["checkpoint", "verify", f"{run.path}:{SAVED}"]) == 0
    assert main(["resume", str(run.path), "--set", "training.stop_after=null"]) == 0
    begin = AttemptStart.read(run.attempt(2).begin)
    assert begin is not None
    assert begin.base_iteration == SAVED
    assert [end.cause for end in ends(run)] == ["done", "done"]
    assert sorted(losses(run.metrics_view)) == list(range(1, STEPS + 1))
    assert losses(run.metrics_view) == pytest.approx(losses(tmp_path / "whole/metrics.jsonl"), rel=1e-5)


if __name__ == "__main__":
    ARCHIVES.mkdir(exist_ok=True)
    record(ARCHIVES / f"{relayrun.__version__}.tar.xz")
