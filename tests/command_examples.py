"""The examples of docs/how-to/command.md, at a pace that a test wants, and what they are compared with."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from relayrun import client
from relayrun.config.compose import resolve, yaml_file
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples/command"
NAMES = ("plain", "ddp", "huggingface")
PACED = ROOT / "tests/paced.py"
RANKS = {"plain": 1, "ddp": 2, "huggingface": 1, "lightning_trainer": 1}
LAST_CHECKPOINT = {
    "plain": "step-{}.pt",
    "ddp": "step-{}",
    "huggingface": "checkpoint-{}",
    "lightning_trainer": "step-{}.ckpt",
}


def config(folder: Path, name: str, *, last: int, pace: list[str], **sections: dict[str, Any]) -> Path:
    """The config of an example with another last iteration, run by tests/paced.py; its run directory is in `folder`."""
    values = yaml_file.read_yaml(FOLDER / f"{name}.yaml").values
    words = [str(last) if word == "200" else word for word in values["command"]["run"]]
    at = next(number for number, word in enumerate(words) if word.endswith(f"{name}.py"))
    words[at:at] = [str(PACED), *pace, "--"]
    values["command"] |= {"run": words, "steps": last}
    values["run_dir"] = str(folder / name)
    for section, changes in sections.items():
        values[section] = (values.get(section) or {}) | changes if isinstance(values.get(section), dict) else changes
    path = folder / f"{name}.yaml"
    path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    resolve.load_run_config(path)
    return path


class Uncut:
    """An example that runs to its end by itself, without a chain: one rank in this process, several in their own."""

    def __init__(self, folder: Path, name: str, last: int) -> None:
        self.folder = folder / f"{name}-uncut"
        (self.folder / "word").mkdir(parents=True)
        self._words = [str(FOLDER / f"{name}.py"), str(self.folder), str(last)]
        self._process = self._start() if name != "plain" else None

    def losses(self) -> dict[int, float]:
        """The loss of each iteration, when it has ended."""
        out = ""
        if self._process is None:
            self._run_here()
        else:
            out, err = self._process.communicate(timeout=900)
            assert self._process.returncode == 0, err
        said = self.folder / "word/steps.jsonl"
        if said.exists():
            return losses(said)
        return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+ loss (\S+)$", out, re.M)}

    def _start(self) -> subprocess.Popen[str]:
        several = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        surroundings = {key: value for key, value in os.environ.items() if not key.startswith("RELAYRUN_")}
        return subprocess.Popen(
            [sys.executable, *(several if "ddp" in self._words[0] else []), *self._words],
            env=surroundings | {client.FOLDER: str(self.folder / "word"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _run_here(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with (
                mock.patch.dict(os.environ, {client.FOLDER: str(self.folder / "word")}),
                mock.patch.object(sys, "argv", self._words),
                torch.random.fork_rng(),
            ):
                runpy.run_path(self._words[0], run_name="__main__")
        finally:
            torch.set_num_threads(threads)


def losses(path: Path) -> dict[int, float]:
    """The loss of each iteration in a file of JSON lines, the client's or the merged view."""
    found: dict[int, float] = {}
    for line in read_json_lines(path):
        loss = line.get("metrics", line).get("loss")
        if loss is not None:
            found[line["iteration"]] = loss
    return found


def assert_same_checkpoints(one: Path, other: Path) -> None:
    """Every tensor and number of two checkpoints is the same, bit for bit; what is none is not compared."""
    if (one / ".metadata").is_file():
        left, right = map(_distributed, (one, other))
        assert left
        assert _plain(left) == _plain(right)
        return
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file()) if one.is_dir() else [Path(".")]
    compared = 0
    for name in files:
        if name.suffix == ".safetensors":
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
            compared += 1
        elif name == Path(".") or (name.suffix in (".pt", ".pth") and name.name != "training_args.bin"):
            left, right = (torch.load(path / name, weights_only=False) for path in (one, other))
            assert _plain(left) == _plain(right), name
            compared += 1
    assert compared


def _distributed(folder: Path) -> dict[str, Any]:
    """What torch.distributed.checkpoint has written."""
    with tempfile.TemporaryDirectory() as made:
        dcp_to_torch_save(folder, Path(made) / "whole.pt")
        found: dict[str, Any] = torch.load(Path(made) / "whole.pt", weights_only=False)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def kill_a_rank(run: Run, name: str) -> int:
    """SIGKILL the last rank of the example that runs for this run; return its process id."""
    found = {}
    for pid, words in processes(run):
        if next(word for word in words[1:] if word != "-u") == str(PACED):  # and no torchrun, srun or starter of ranks
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            found[next(int(variable[5:]) for variable in variables if variable.startswith("RANK="))] = pid
    assert sorted(found) == list(range(RANKS[name])), found
    os.kill(found[max(found)], signal.SIGKILL)
    return found[max(found)]


def left_over(run: Run) -> list[list[str]]:
    """Command lines of processes that still work for this run."""
    return [words for _, words in processes(run)]


def processes(run: Run) -> list[tuple[int, list[str]]]:
    """Process ids and command lines of what works for this run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.endswith(str(run.checkpoints)) for word in words):
            found.append((int(folder.name), words))
    return found
