"""A run with checkpoints, and a second place for copies of them."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import xxhash

from relayrun.control.rundir import mirror as records
from relayrun.control.rundir.mirror import MirrorPolicy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.files import file_sizes
from relayrun.train.checkpoint import checksums, publish
from relayrun.train.mirror import sync
from tests.chain.conftest import MakeRun
from tests.history import began

SIZE = 3000
"""Bytes of a file of a checkpoint; the copy takes them piece by piece."""


class Mirrored:
    """A run with checkpoints, as training writes them, and a second place."""

    def __init__(self, make: MakeRun, folder: Path, *, name: str = "run") -> None:
        self.run, _ = make(folder=name, auto_requeue=False)
        began(self.run, 1)
        self.run.checkpoints.mkdir()
        (folder / "second").mkdir(exist_ok=True)
        self.place = folder / "second/mine/run"
        self.policy()

    def policy(self, **changes: object) -> None:
        values = MirrorPolicy(
            folder=str(self.place),
            id="0123",
            keep_last=2,
            program=[sys.executable, "-m", "relayrun.cli", "checkpoint", "mirror"],
        )
        self.run.mirror.mkdir(exist_ok=True)
        replace(values, **changes).write(self.run.mirror_policy)  # type: ignore[arg-type]

    def save(self, iteration: int, *, hashed: bool = True, salt: str = "", keep_last: int = 100) -> CheckpointCommit:
        """Publish a checkpoint of two files; without hashes, as a foreign program does."""
        staged = publish.prepare_staging(self.run, 1, iteration)
        for name in ("common.pt", "part/data"):
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(f"{iteration} {name} {salt}".encode().ljust(SIZE, b"."))
        root = checksums.write_checksum_index(staged, iteration, {}) if hashed else None
        commit = CheckpointCommit(
            iteration=iteration,
            path=str(self.run.checkpoint(iteration)),
            consumed_samples=1,
            time=time.time(),
            seconds=1.0,
            files=file_sizes(staged),
            checksum=root,
        )
        publish.publish_checkpoint(self.run, 1, commit, staged)
        publish.prune_checkpoints(self.run, 1, keep_last)
        return commit

    def save_without_hashes(self, iteration: int, *, file: bool = False) -> CheckpointCommit:
        """Publish a checkpoint as a foreign program does, in one `file` or in a folder."""
        commit = self.save(iteration, hashed=False)
        if file:
            shutil.rmtree(commit.path)
            Path(commit.path).write_bytes(b"all in one" * 200)
            attempt = self.run.attempt(1)
            lines = attempt.commits.read_text().splitlines()[:-1]
            attempt.commits.write_text("".join(line + "\n" for line in lines))
            attempt.append_commit(replace(commit, files=file_sizes(commit.path)))
        return commit

    def compute_again(self, iterations: tuple[int, ...], data: bytes) -> None:
        """Go back, and save these iterations anew in another attempt."""
        began(self.run, 2, base=10)
        for iteration in iterations:
            shutil.rmtree(self.run.checkpoint(iteration))
            staged = publish.prepare_staging(self.run, 2, iteration)
            (staged / "data").write_bytes(data)
            root = checksums.write_checksum_index(staged, iteration, {})
            path = str(self.run.checkpoint(iteration))
            commit = CheckpointCommit(iteration=iteration, path=path, consumed_samples=1, time=time.time(), seconds=1.0)
            publish.publish_checkpoint(self.run, 2, replace(commit, files=file_sizes(staged), checksum=root), staged)

    def lose(self) -> None:
        """Lose the run's own checkpoints, as by a purge."""
        for path in self.run.checkpoints.glob("iter_*"):
            shutil.rmtree(path)

    def sync(self, **options: object) -> list[str]:
        """Make a pass that succeeds; what it did."""
        done = sync.mirror_checkpoints(self.run, **options)  # type: ignore[arg-type]
        assert done.complaints == []
        return [line.split(":")[0].split(",")[0] for line in done.lines]

    def claimed(self) -> list[int]:
        """Iterations that are claimed to be in the second place; each is there, byte for byte."""
        found = records.read_copies(self.place)
        for copy in found.values():
            assert digest(self.place / copy.name) == self.known[copy.iteration]
        return sorted(copy.iteration for copy in found.values())

    def remember(self) -> None:
        """Note what the checkpoints hold that there are."""
        self.known = {
            int(path.name.removeprefix("iter_")): digest(path) for path in self.run.checkpoints.glob("iter_*")
        }


def digest(path: Path) -> str:
    """One hash of all files and their names."""
    found = xxhash.xxh3_128()
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            found.update(f"{each.relative_to(path)} {each.stat().st_size} ".encode() + each.read_bytes())
    return str(found.hexdigest())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 4
    path.write_bytes(data)
