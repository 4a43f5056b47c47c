"""Mutated checkpoints: each is read as values or refused in seconds and a gigabyte, and the process is as it was."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from relayrun.control.trainers.pickle_records import RefusedPickle
from relayrun.control.trainers.torch_files import read_bounded

CHILD = Path(__file__).with_name("fuzzed_pickles.py")


def metadata() -> bytes:
    """A small `.metadata`, as torch writes it."""
    kinds: dict[str, Any] = {"extra": BytesStorageMetadata()}
    places: dict[Any, Any] = {MetadataIndex("extra"): _StorageInfo("__0_0.distcp", 0, 10)}
    for name in ("a.weight", "b.weight"):
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))
        kinds[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 4]), [chunk])
        places[MetadataIndex(name, torch.Size([0, 0]), 0)] = _StorageInfo("__0_0.distcp", 10, 32)
    return pickle.dumps(Metadata(kinds, None, places, StorageMeta(Path("/x"), modules=["a"])))


def common() -> bytes:
    """A small `common.pt`, as Megatron-LM writes it."""
    args = Namespace(dtype=torch.bfloat16, path=Path("/x"), many=(1, [2.5, None]), numbers={0: 1, 1 << 40: b"x"})
    buffer = io.BytesIO()
    torch.save({"args": args, "iteration": 7, "o": OrderedDict(a={1}), "step": torch.arange(6.0)}, buffer)
    return buffer.getvalue()


def run_child(folder: Path, rounds: int) -> None:
    (folder / "metadata").write_bytes(metadata())
    (folder / "common").write_bytes(common())
    seed = str(random.SystemRandom().randrange(1 << 32))
    words = [sys.executable, str(CHILD), str(folder), seed, str(rounds)]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=3000, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr[-4000:]}"
    read, refused = map(int, done.stdout.split())
    assert read > rounds / 50, "nearly all are refused: mutations do not reach far"
    assert refused > rounds / 10


@pytest.mark.slow
def test_mutated_files_change_nothing(tmp_path: Path) -> None:
    run_child(tmp_path, 3000)


@pytest.mark.slow
@pytest.mark.long
def test_a_hundred_thousand_mutated_files_change_nothing(tmp_path: Path) -> None:
    run_child(tmp_path, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["changes", "imports", "is slow", "takes memory"])
def test_a_reader_that_does_harm_is_found(tmp_path: Path, fault: str) -> None:
    (tmp_path / "fault").write_text(fault)
    with pytest.raises(AssertionError, match=fault):
        run_child(tmp_path, 300)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(6000)
def test_commands_read_mutated_checkpoints_and_only_refuse_them(tmp_path: Path) -> None:
    """Through `relayrun import megatron` and `export hf`, 250 times each."""
    source, victim = tmp_path / "iter_0000007", tmp_path / "victim"
    source.mkdir()
    victim.mkdir()
    (victim / "thesis").write_text("two weeks of work")
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (source / "__0_0.distcp").write_bytes(bytes(64))
    program = f"""
import resource, sys, time
from relayrun.cli import main
from tests.trainers.fuzzed_pickles import mutated, memory_limit
import random
from pathlib import Path
source, rng = Path({str(source)!r}), random.Random({time.time_ns()})
originals = {{".metadata": {metadata()!r}, "common.pt": {common()!r}}}
for number in range(500):
    for name, data in originals.items():
        (source / name).write_bytes(mutated(data, rng) if rng.random() < 0.7 else data)
    words = ["import", "megatron"] if number % 2 else ["export", "hf"]
    began = time.process_time()
    with memory_limit(1 << 30):
        code = main([*words, str(source), "--output", {str(tmp_path / "out")!r}])
    assert code in (0, 1, 2), code
    assert time.process_time() - began < 10  # the machine may be busy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=5900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    assert (victim / "thesis").exists()


HEADS = {
    b"]": b"](",
    b"}": b"](",
    b"N\x85": b"](",
    b"M\xff\xff": b"](",
    b"G\x01\x02\x03\x04\x05\x06\x07\x08": b"](",
    b"\x8c\x02ab": b"](",
    b"\x8c\x08abcd\xf0\x9f\x98\x80": b"](",
    b"h\x00)\x81": b"cpathlib\nPosixPath\n\x94](",
    b"]Na": b"](",
    b"}K\x01Ns": b"](",
    b"\x94": b"N(",
    b"(": b"",
}
"""Pieces that make the most memory for their bytes, and the beginnings of their pickles."""


@pytest.mark.slow
def test_a_crafted_pickle_is_refused_before_it_takes_memory() -> None:
    """Each is large enough to take five times its budget."""
    program = f"""
import re
from relayrun.control.trainers.pickle_records import RefusedPickle, read_records
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
for unit, head in {HEADS!r}.items():
    data = b"\\x80\\x04" + head + unit * (30_000_000 // len(unit)) + b"e."
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    try:
        read_records(data, 100_000_000)
        print("read", unit)
    except RefusedPickle as error:
        assert "needs more than 100000000 bytes of memory" in str(error), error
    if peak() - before > 100_000_000:
        print(peak() - before, unit)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_metadata_of_hundreds_of_megabytes_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / ".metadata", "wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(RefusedPickle, match=r"\.metadata has more than 67108864 bytes"):
        read_bounded(tmp_path / ".metadata")
