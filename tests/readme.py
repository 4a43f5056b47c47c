"""Commands of pages, and a copy of the repository in which they can be run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(kind: str, text: str = README) -> list[str]:
    """Code blocks of one kind.

    `bash` runs here, `bash install` before it in a checkout, `bash slurm` on a cluster; CI runs `bash make`.
    """
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files of this repository, and those that will be tracked."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


def commit_copy(folder: Path) -> Path:
    """Copy the tracked files into a repository of one commit; return it."""
    copy_tracked(folder)
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], [*author, "commit", "--quiet", "--message=all"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def break_code(root: Path) -> None:
    """Edit the checkout so that nothing of it works any more."""
    (root / "relayrun/__init__.py").write_text("raise SystemExit('the checkout was used')\n")
    for name in ("job.sh", "rank.sh", "launch.sh"):
        (root / "launchers/lib" / name).write_text("exit 1\n")


def path_with_relayrun() -> str:
    """Return PATH with the programs of the environment that the tests run in."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def checkout(folder: Path) -> dict[str, str]:
    """Copy the tracked files, make the data that the README speaks of; return the environment to run in."""
    copy_tracked(folder)
    (folder / ".venv").symlink_to(sys.prefix)
    for dataset, word in (("my-text", "prose"), ("my-code", "code")):
        (folder / "data" / dataset).mkdir(parents=True)
        for part in range(4):
            texts = [f"{word} document {part} {number} says {'so ' * (number % 40 + 20)}" for number in range(200)]
            pq.write_table(pa.table({"text": texts}), folder / "data" / dataset / f"part-{part}.parquet")
    train_tokenizer([folder / "data/my-text"], folder / "data/tokenizer", vocabulary_size=300)
    return {"PATH": path_with_relayrun(), "HOME": str(folder), "PYTHONPATH": str(folder)}


def tokenize(folder: Path, environment: dict[str, str], dataset: str) -> None:
    """What the README does with my-text, for another dataset."""
    settings = folder / f"{dataset}.yaml"
    example = (folder / "configs/data/tokenization-example.yaml").read_text(encoding="utf-8")
    settings.write_text(example.replace("my-text", dataset), encoding="utf-8")
    for command in (
        [
            "scripts/tokenization/prepare_dumps.py",
            "--dataset-folder",
            f"data/{dataset}",
            "--preprocessing-metadata-folder",
            f"data/{dataset}-dumps",
        ],
        ["launchers/submit_tokenization.py", str(settings), "--executor", "local"],
    ):
        subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, check=True, capture_output=True, timeout=600
        )
