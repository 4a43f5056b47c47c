"""`relayrun.checkpoints` and `relayrun checkpoint commit | verify` on checkpoints of any program."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun import checkpoints, client
from relayrun.checkpoints import Checkpoint, DamagedCheckpoint
from relayrun.cli import main
from relayrun.files import read_json_lines

PATH = str(Path(__file__).resolve().parents[2])


def write(folder: Path, step: int, *, files: int = 3) -> None:
    (folder / "parts").mkdir(exist_ok=True)
    for number in range(files):
        (folder / "parts" / f"{number}.bin").write_bytes(random.Random(step * 100 + number).randbytes(40_000))
    (folder / "step.json").write_text(json.dumps(step))


def save(root: Path, step: int, **settings: Any) -> Path:
    with checkpoints.saving(root, step, **settings) as folder:
        write(folder, step)
    return root / f"step_{step:07}"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def test_a_save_is_whole_verified_and_one_of_a_number(tmp_path: Path) -> None:
    root = tmp_path / "out"
    assert checkpoints.newest(root) is None
    for step in (100, 200, 300, 400):
        save(root, step, keep_last=2, keep_every=200)
    assert visible(root) == ["step_0000200", "step_0000300", "step_0000400"]
    assert checkpoints.newest(root) == Checkpoint(400, root / "step_0000400")
    assert json.loads((root / "step_0000400" / "step.json").read_text()) == 400


def test_a_kill_behind_the_final_name_leaves_no_checkpoint_of_which_the_chain_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would go on from it, and the chain count from the one before."""
    (tmp_path / "client").mkdir()
    monkeypatch.setenv(client.FOLDER, str(tmp_path / "client"))
    rename = os.rename

    def killed(source: str, target: str) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "out", 10)
    found = checkpoints.newest(tmp_path / "out")
    assert found is not None
    (said,) = read_json_lines(tmp_path / "client" / "checkpoints.jsonl")
    assert (said["iteration"], said["path"]) == (found.step, str(found.path))


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "index"])
def test_a_damaged_one_goes_to_quarantine_and_the_one_before_is_found(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    part = tmp_path / "step_0000002" / ("checksums.json" if damage == "index" else "parts/1.bin")
    if damage in ("flip", "index"):
        flip(part)
    elif damage == "cut":
        os.truncate(part, 100)
    else:
        part.unlink()
    assert checkpoints.newest(tmp_path) == Checkpoint(1, tmp_path / "step_0000001")
    (reason,) = (tmp_path / ".quarantine").glob("*.json")
    assert json.loads(reason.read_text())["iteration"] == 2
    assert visible(tmp_path) == ["step_0000001"]


def test_no_whole_one_is_an_error_and_never_the_beginning(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip(tmp_path / "step_0000001" / "step.json")
    with pytest.raises(DamagedCheckpoint, match="none of its checkpoints is whole"):
        checkpoints.newest(tmp_path)
    with pytest.raises(DamagedCheckpoint, match="none of its checkpoints is whole"):
        checkpoints.newest(tmp_path)
    for step in (2, 3, 4, 5):
        flip(save(tmp_path, step) / "step.json")
    with pytest.raises(DamagedCheckpoint, match="3 in a row"):
        checkpoints.newest(tmp_path)
    assert visible(tmp_path) == ["step_0000002", "step_0000003"]


def test_a_block_that_raises_commits_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), checkpoints.saving(tmp_path, 2) as folder:
        write(folder, 2 // 0)
    assert checkpoints.newest(tmp_path) == Checkpoint(1, tmp_path / "step_0000001")
    save(tmp_path, 2)
    assert checkpoints.newest(tmp_path) == Checkpoint(2, tmp_path / "step_0000002")


def test_training_that_went_back_hides_what_was_beyond(tmp_path: Path) -> None:
    for step in (100, 200, 300, 200):
        save(tmp_path, step)
        time.sleep(0.02)  # the clock of files is coarse
    assert checkpoints.newest(tmp_path) == Checkpoint(200, tmp_path / "step_0000200")
    assert visible(tmp_path) == ["step_0000100", "step_0000200", "step_0000300"]


PROGRAM = """
import sys
from pathlib import Path
from relayrun import checkpoints
from tests.train.test_checkpoints_of_others import write
root = Path(sys.argv[1])
found = checkpoints.newest(root)
step = 0 if found is None else found.step
print(step, flush=True)
while True:
    step += 1
    with checkpoints.saving(root, step, keep_last=2) as folder:
        write(folder, step)
"""


def test_kills_at_random_moments_leave_a_whole_newest_one(tmp_path: Path) -> None:
    choose, before = random.Random(7), 0
    for _ in range(6):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path],
            env=os.environ | {"PYTHONPATH": PATH},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        begun = int(program.stdout.readline())
        time.sleep(choose.uniform(0.0, 0.4))
        program.send_signal(signal.SIGKILL)
        program.wait(60)
        program.stdout.close()
        found = checkpoints.newest(tmp_path)
        step = 0 if found is None else found.step
        assert step >= begun >= before, "what was committed is not lost"
        assert found is None or json.loads((found.path / "step.json").read_text()) == step
        assert not (tmp_path / ".quarantine").exists(), "a kill damages nothing"
        before = step
    assert before > 0
    save(tmp_path, before + 1, keep_last=2)
    assert len(visible(tmp_path)) <= 3
    assert not (tmp_path / ".staging").exists()


def test_a_chain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.FOLDER, str(tmp_path))
    folder = save(tmp_path / "out", 5)
    (line,) = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().split("\n") if line]
    assert (line["iteration"], line["path"]) == (5, str(folder))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (500, 1000):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        write(folder, step)
        assert main(["checkpoint", "commit", str(folder)]) == 0
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "clean: " in capsys.readouterr().out
    flip(tmp_path / "out" / "checkpoint-500" / "step.json")
    assert main(["checkpoint", "verify", str(tmp_path / "out" / "checkpoint-500")]) == 1
    assert "step.json is not the one that was saved" in capsys.readouterr().out
    assert main(["checkpoint", "commit", str(tmp_path / "out" / "checkpoint-500")]) == 0
    assert "step 1000 beside it counts no more" in capsys.readouterr().out
    assert [each.step for each in checkpoints.committed(tmp_path / "out")] == [500]
    time.sleep(0.02)
    assert main(["checkpoint", "commit", str(tmp_path / "out" / "checkpoint-1000")]) == 0
    assert [each.step for each in checkpoints.committed(tmp_path / "out")] == [1000, 500]


def test_the_pages_program_runs(tmp_path: Path) -> None:
    """The first block of docs/how-to/own-checkpoints.md, twice: the second goes on."""
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/own-checkpoints.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    for last in (10, 20):
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATH}, check=True)
        assert checkpoints.newest(tmp_path / "out") == Checkpoint(last, tmp_path / "out" / f"step_{last:07}")
