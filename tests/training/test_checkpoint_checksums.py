"""Every byte of a checkpoint has one hash that it is compared with, on the way that a load takes."""

from __future__ import annotations

import io
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.files import file_sizes, write_atomic
from relayrun.train.checkpoint import checksums, publish
from relayrun.train.checkpoint.async_writer import ThreadedWriter, check_complete
from relayrun.train.checkpoint.checksums import DamagedCheckpoint, verify_checkpoint
from relayrun.train.checkpoint.reader import CheckedReader, reported_error
from tests.chain.exhaustion import KILL, run_child
from tests.chain.fake_slurm import FakeSlurm
from tests.history import began

from .conftest import Harness

pytestmark = pytest.mark.slow

FLIPS = 1000
SHORT = 60


def read_all(folder: Path, root: str | None) -> dict[str, Any]:
    """Read everything by the reader of a load. Raises Damaged."""
    reader = CheckedReader(folder, root)
    state: dict[str, Any] = {"common": reader.common()}
    planner = _EmptyStateDictLoadPlanner()
    found: dict[str, Any] = {}
    try:
        state_dict_loader._load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    except BaseException as error:  # torch's own is no Exception
        raise reported_error(error, DamagedCheckpoint) or error from None
    return state | found


def places(folder: Path, count: int) -> Iterator[tuple[Path, int, int]]:
    """A file, a byte and a bit of it, `count` times: each file by turns, and between them any byte of them all."""
    generator = random.Random(17)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    weights = [path.stat().st_size for path in files]
    for number in range(count):
        path = generator.choices(files, weights)[0] if number % 2 else files[number // 2 % len(files)]
        yield path, generator.randrange(path.stat().st_size), 1 << generator.randrange(8)


@pytest.mark.parametrize("count", [SHORT, pytest.param(FLIPS, marks=pytest.mark.long)])
def test_every_flipped_bit_is_found_and_nothing_is_loaded(trained: Harness, tmp_path: Path, count: int) -> None:
    commit = trained.attempts[0].commits[0]
    folder = Path(shutil.copytree(commit.path, tmp_path / "copy"))
    assert verify_checkpoint(folder, commit.checksum) == (
        sum(commit.files.values()) - (folder / checksums.CHECKSUM_INDEX).stat().st_size,
        [],
    )
    whole = read_all(folder, commit.checksum)
    assert any(isinstance(value, torch.Tensor) for value in whole.values())
    found, files = 0, set()
    for path, at, bit in places(folder, count):
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes([before[0] ^ bit]))
        try:
            with pytest.raises(DamagedCheckpoint):
                read_all(folder, commit.checksum)
            assert verify_checkpoint(folder, commit.checksum)[1], f"{path.name} {at}"
            found += 1
            files.add(path.name)
        finally:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(before)
    assert found == count
    assert files == set(commit.files), "a byte of each file, those with the hashes too"
    assert read_all(folder, commit.checksum).keys() == whole.keys()


def test_a_hash_says_which_values_of_which_iteration_lie_there(trained: Harness) -> None:
    """It was taken before a file was written: whoever has the state of an iteration can tell its checkpoint."""
    commit = trained.attempts[0].commits[0]
    folder = Path(commit.path)
    found = checksums.Checksums(folder, commit.checksum)
    assert found.iteration == commit.iteration == 4
    blocks = list(found.blocks())
    assert {block.file for block in blocks} == {name for name in commit.files if name.endswith(".distcp")}
    tensors = 0
    for block in blocks:
        data = (folder / block.file).read_bytes()[block.at : block.at + block.bytes]
        value = torch.load(io.BytesIO(data), weights_only=True)
        if block.shape is None:
            assert block.values is None
            continue
        tensors += 1
        assert (list(value.shape), str(value.dtype)) == (block.shape, f"torch.{block.dtype}")
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert block.values == checksums.checksum_of_bytes(raw).xxh3_128
        assert data[block.values_at : block.values_at + block.values_bytes] == raw
    assert tensors > 20


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: shutil.copy(folder / "__0_0.distcp", folder / "__7_0.distcp"), "__7_0.distcp does not belong"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "checksums.json").unlink(), "checksums.json is missing"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 5000), "__0_0.distcp has 5000 bytes"),
    ],
)
def test_a_piece_that_is_missing_torn_or_too_many(
    trained: Harness, tmp_path: Path, harm: Callable[[Path], Any], words: str
) -> None:
    commit = trained.attempts[0].commits[0]
    folder = Path(shutil.copytree(commit.path, tmp_path / "copy"))
    harm(folder)
    with pytest.raises(DamagedCheckpoint, match=words):
        read_all(folder, commit.checksum)
    assert words in verify_checkpoint(folder, commit.checksum)[1][0]


def test_a_file_that_is_no_piece_harms_nothing(trained: Harness, tmp_path: Path) -> None:
    commit = trained.attempts[0].commits[0]
    folder = Path(shutil.copytree(commit.path, tmp_path / "copy"))
    (folder / "why-we-keep-this.txt").write_text("a person's note")
    (folder / "evaluated.json").write_text("{}")
    assert verify_checkpoint(folder, commit.checksum)[1] == []
    read_all(folder, commit.checksum)


def test_values_that_change_between_the_copy_and_the_file_are_found(tmp_path: Path) -> None:
    """The hash is that of the copy, not of what went to the disk."""
    tensor = torch.arange(100_000, dtype=torch.float32)
    claimed = checksums.checksum_of_bytes(bytes(tensor.nbytes)).xxh3_128
    save(tmp_path, {"weights": tensor}, 10, digests={tensor.data_ptr(): str(claimed)})
    assert verify_checkpoint(tmp_path, None)[1] == [
        "the values of weights in __0_0.distcp are not those that were saved"
    ]


def save(folder: Path, state: dict[str, Any], iteration: int, digests: dict[int, str] | None = None) -> str:
    """The writes of a save on one rank, in their order; return the root."""
    plain = io.BytesIO()
    torch.save({"iteration": iteration}, plain)
    write_atomic(folder / "common.pt", plain.getvalue())
    writer = ThreadedWriter(folder, 2, digests)
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    files = checksums.write_block_checksums(folder, 0, iteration, writer.written.blocks, writer.written.sizes)
    write_atomic(folder / "metadata.json", b"{}")
    check_complete(folder)
    return checksums.write_checksum_index(
        folder,
        iteration,
        {
            "common.pt": checksums.checksum_of_bytes(plain.getvalue()),
            "metadata.json": checksums.checksum_of_bytes(b"{}"),
        }
        | files
        | writer.written.files,
    )


def save_and_publish(run: Run, iteration: int) -> None:
    state = {"weights": torch.full((30_000,), float(iteration)), "step": torch.tensor(float(iteration))}
    staged = publish.prepare_staging(run, 1, iteration)
    root = save(staged, state, iteration)
    commit = CheckpointCommit(
        iteration=iteration,
        path=str(run.checkpoint(iteration)),
        consumed_samples=0,
        time=time.time(),
        seconds=0.0,
        files=file_sizes(staged),
        checksum=root,
    )
    publish.publish_checkpoint(run, 1, commit, staged)


@pytest.mark.filterwarnings("ignore")  # that a program with threads forks
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_between_any_two_writes_of_a_save_leaves_a_clean_checkpoint(tmp_path: Path, stride: int) -> None:
    def fresh(name: str) -> Run:
        run = Run(tmp_path / name)
        run.checkpoints.mkdir(parents=True)
        began(run, 1, base=0)
        save_and_publish(run, 10)
        return run

    (tmp_path / "scratch").mkdir()
    slurm = FakeSlurm(tmp_path / "scratch" / "jobs.json", "none")
    first = fresh("first")
    before = shutil.copytree(first.path, tmp_path / "before")

    def program() -> int:
        save_and_publish(first, 20)
        return 0

    every = run_child(program, first.path, slurm)
    assert every.code == 0, every.output
    assert resume_point(first).iteration == 20
    at = [number for number in range(len(every.calls)) if number % stride == 0]
    assert len(every.calls) > 20
    reached = set()
    for number in at:
        shutil.rmtree(first.path)
        shutil.copytree(before, first.path)
        assert run_child(program, first.path, slurm, at=number, fault=KILL).code == 128 + 9
        run = Run(first.path)
        base = resume_point(run)
        assert base.path is not None
        (commit,) = (commit for commit in run.attempt(1).read_commits() if commit.iteration == base.iteration)
        assert verify_checkpoint(Path(base.path), commit.checksum)[1] == []
        found = read_all(Path(base.path), commit.checksum)
        assert found["weights"].unique().tolist() == [float(base.iteration)]
        reached.add(base.iteration)
        save_and_publish(run, 30)  # and the next save finds nothing in its way
        assert resume_point(Run(first.path)).iteration == 30
    assert reached <= {10, 20}
    assert 10 in reached


def test_a_hook_may_put_files_of_its_own_beside_them(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "1.txt").write_text("a sample")
    root = save(tmp_path, {"weights": torch.ones(3)}, 10)
    assert verify_checkpoint(tmp_path, root)[1] == []
    (tmp_path / "samples" / "1.txt").write_text("a simple")
    assert verify_checkpoint(tmp_path, root)[1] == ["samples/1.txt is not the one that was saved"]


def test_the_checkpoint_of_another_commit_is_not_taken_for_this_one(tmp_path: Path) -> None:
    root = save(tmp_path, {"weights": torch.ones(3)}, 10)
    with pytest.raises(DamagedCheckpoint, match="not the one that was saved"):
        read_all(tmp_path, "0" * 32)
    assert read_all(tmp_path, root)["weights"].tolist() == [1, 1, 1]
