"""Messages between ranks hold data: what they carry, and what of an attacker's bytes runs (nothing)."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import InputError
from tests import warm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        LoadItemType,
        LoadPlan,
        ReadItem,
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    from relayrun.train.checkpoint.checksums import DamagedCheckpoint
    from relayrun.train.messages import NotAMessage, RankObjectCollectives, _packed, pack, unpack

SIZE = torch.Size([4, 8])
INDEX = MetadataIndex("model.weight", torch.Size([0, 8]), 3)
VALUES: list[Any] = [
    None,
    True,
    [1, -2.5, float("inf"), 1 << 70, "text"],
    (1, (2, [3, (4,)])),
    {"a": {1: (2,)}, (1, 2): None, 3: {}},
    [{1, 2}, b"bytes"],
    SIZE,
    [torch.bfloat16, torch.strided, torch.contiguous_format],
    slice(1, None, 2),
    SavePlan(
        [
            WriteItem(
                INDEX,
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(SIZE, SIZE), TensorProperties(torch.float32), SIZE),
            )
        ],
        storage_data={"prefix": "x"},
    ),
    LoadPlan([ReadItem(LoadItemType.TENSOR, INDEX, SIZE, INDEX, SIZE, SIZE)]),
    [WriteResult(INDEX, 7, _StorageInfo("a.distcp", 1, 2))],
    CheckpointCommit(iteration=1, path="/x", consumed_samples=2, time=3.0, seconds=4.0),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_arrive_as_they_were_sent(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)


def test_a_part_of_a_tensor_arrives_without_its_data() -> None:
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4), replica_id=(0, 1, 2)).without_data()
    found = unpack(pack(part))
    assert found == part
    assert unpack(pack(np.int64(3))) == 3
    for value in (torch.arange(6).reshape(2, 3), torch.zeros(0, 2), torch.tensor(1.5, dtype=torch.bfloat16)):
        found = unpack(pack(value))
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)


@pytest.mark.parametrize(
    "error",
    [
        InputError("missing", where="/x", hint="look there"),
        DamagedCheckpoint("torn", where="/x"),
        FileNotFoundError(2, "No such file", "/x"),
        KeyError("index"),
        ValueError("a", 1),
    ],
    ids=repr,
)
def test_an_error_arrives_with_its_class_and_its_words(error: Exception) -> None:
    found = unpack(pack(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
    if isinstance(error, OSError):
        assert found.errno == error.errno


def test_an_error_that_no_message_holds_arrives_in_words() -> None:
    class Own(LookupError):
        pass

    class Alone(Exception):
        pass

    assert repr(unpack(pack(Own("x")))) == "LookupError('Own: x')"
    assert repr(unpack(pack(Alone("x")))) == "RuntimeError('Alone: x')"
    assert isinstance(unpack(pack(json.JSONDecodeError("torn", "{", 1))), ValueError)


def test_the_failures_of_ranks_arrive_with_their_places() -> None:
    try:
        raise InputError("missing")
    except InputError as error:
        wrapped = _wrap_exception(error)
    _, stack = unpack(pack(wrapped))
    assert isinstance(stack, traceback.StackSummary)
    assert stack[0].name == "test_the_failures_of_ranks_arrive_with_their_places"
    failure = unpack(pack(CheckpointException("write", {1: wrapped})))
    assert isinstance(failure, CheckpointException)
    assert str(failure.failures[1][0]) == "missing"


@pytest.mark.parametrize("value", [object(), Path("/x"), 1j, os.system, Path, print, array("i")])
def test_a_message_holds_no_other_objects(value: Any) -> None:
    with pytest.raises(TypeError, match="a message between ranks holds"):
        pack([value])


@pytest.mark.parametrize(
    "message",
    [
        {"record": ["subprocess:Popen", ["id"]]},
        {"record": ["pathlib:PosixPath", []]},
        {"record": ["relayrun.errors:InputError", []]},
        {"record": ["relayrun.files:Path", []]},
        {"record": ["relayrun.train.messages:os.system", ["id"]]},
        {"record": ["relayrun.train.messages:pack", ["id"]]},
        {"record": ["relayrun.control.rundir.records:CheckpointCommit", [1]]},
        {"record": ["no.such.module:X", []]},
        {"record": [7, []]},
        {"error": ["builtins:eval", {"tuple": ["1"]}, {"dict": []}]},
        {"error": ["relayrun.control.rundir.records:CheckpointCommit", {"tuple": []}, {"dict": []}]},
        {"enum": ["builtins:OSError", "errno"]},
        {"enum": ["torch.distributed.checkpoint.planner:WriteItemType", "__class__"]},
        {"torch": "load"},
        {"torch": "os"},
        {"size": ["x"]},
        {"dict": [[[1], 2]]},
        {"tuple": 7},
        {"what": 7},
        {"tuple": [], "dict": []},
        {},
    ],
    ids=json.dumps,
)
def test_bytes_that_name_anything_else_are_no_message(message: dict[str, Any]) -> None:
    with pytest.raises(NotAMessage):
        unpack(json.dumps(message).encode())


def test_mutated_messages_are_refused_or_data() -> None:
    chance, before = random.Random(1), set(sys.modules)
    data = pack(VALUES)
    refused = 0
    for _ in range(3000):
        at = chance.randrange(len(data))
        torn = data[:at] + chance.choice([b"", b"0", b'"', b"[", b"x", b"\xff", data[at : at + 9] * 2]) + data[at + 1 :]
        try:
            unpack(torn)
        except NotAMessage:
            refused += 1
    assert 1000 < refused < 3000
    assert set(sys.modules) == before


VICTIM = """
import sys, torch.distributed as dist
from relayrun.train.messages import RankObjectCollectives, send_no_pickles
dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
send_no_pickles()
for hear in (
    lambda: RankObjectCollectives(dist.group.WORLD, 7).broadcast(None),
    lambda: dist.broadcast_object_list([None], src=0),
):
    try:
        print("victim got", hear())
    except Exception as error:
        print("refused", type(error).__name__, flush=True)  # torch may abort at the exit of a lonely rank
"""
EVIL = """
import os, sys, pickle, torch, torch.distributed as dist
from relayrun.train import messages
class X:
    def __reduce__(self):
        return (os.system, ("touch " + sys.argv[2],))
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=2)
messages._packed = lambda value: torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
messages.RankObjectCollectives(dist.group.WORLD, 7).broadcast(X())
dist.broadcast_object_list([X()], src=0)  # torch's own, with its pickle
"""


@pytest.mark.slow
def test_a_pickle_from_another_rank_runs_nothing(tmp_path: Path) -> None:
    assert pickle  # what the other side sends
    where = [f"file://{tmp_path}/store", str(tmp_path / "pwned")]
    with open(os.devnull, "wb") as nothing:
        evil = warm.start([sys.executable, "-c", EVIL, *where], stdout=nothing.fileno(), stderr=nothing.fileno())
    victim = warm.run([sys.executable, "-c", VICTIM, *where])
    assert evil.wait(300) in (0, -signal.SIGABRT)  # torch may abort at the exit of a lonely rank
    assert victim.stdout == "refused NotAMessage\n" * 2, victim.stderr
    assert not (tmp_path / "pwned").exists()


NEIGHBOUR = """
import logging, os, sys, torch
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from relayrun.control.agent.memory_copies import MemorySlot, read_copies
from relayrun.train.checkpoint.memory_replication import NeighbourReplica, write_copy
rank, store, folder, secret, restart, skipped, turned = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]
logging.basicConfig(stream=sys.stdout, format="%(message)s")
folder.mkdir()
os.environ["RELAYRUN_RESTART"] = restart
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
ranks = SimpleNamespace(rank=rank, world_size=2, cpu_group=dist.group.WORLD)
replica = NeighbourReplica(folder, ranks, per_node=1, secret=secret.encode() * 32)
replica._transfers = int(skipped)
sends = dist.isend
def turn(tensor, *arguments):
    if turned == "1" and len(tensor) == 6 * 1000 * 1000 - (1 << 22):  # the last part of the copy
        tensor = tensor.clone()
        tensor[5] ^= 1
    return sends(tensor, *arguments)
dist.isend = turn
own = MemorySlot(folder, rank, 0)
size = 6 * 1000 * 1000
own.reserve(size)
data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
copy = write_copy(own, [data], rank=rank, ranks=2, iteration=7, size=size, plain=0, layout="x")
replica.send(copy)
replica._thread.join(30)
print("kept", [found.rank for found in read_copies(folder) if found.kept], flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [1]),
        pytest.param({"secret": "b"}, [], marks=pytest.mark.long),
        pytest.param({"turned": "1"}, [], marks=pytest.mark.long),
        pytest.param({"restart": "2"}, [], marks=pytest.mark.long),
        pytest.param({"skipped": "1"}, [], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_copy_counts_only_with_the_hmac_of_this_transfer(
    tmp_path: Path, changes: dict[str, str], kept: list[int]
) -> None:
    """Rank 1 knows the secret, the restart and the number of the transfer, or not; rank 0 keeps its copy, or not."""
    usual = {"secret": "a", "restart": "1", "skipped": "0", "turned": "0"}
    command = [sys.executable, "-c", NEIGHBOUR]
    where = f"file://{tmp_path}/store"
    first = [*command, "0", where, str(tmp_path / "0"), *usual.values()]
    second = [*command, "1", where, str(tmp_path / "1"), *(usual | changes).values()]
    with open(os.devnull, "wb") as nothing:
        other = warm.start(second, stdout=nothing.fileno(), stderr=nothing.fileno())
    done = warm.run(first)
    other.kill()
    other.wait(60)
    assert done.stdout.splitlines()[-1] == f"kept {kept}", done.stdout + done.stderr
    assert ("bytes without the HMAC of this attempt" in done.stdout) == bool(changes)


def test_the_records_of_all_ranks_are_not_visited_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector visits what one rank has sent when the next one is read: more than linear in the ranks."""
    sent, collections = _packed([{number: (number,)} for number in range(2000)]), 0

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal collections
        collections += phase == "start"

    first = object.__new__(RankObjectCollectives)
    first.rank, first.size = 0, 9
    monkeypatch.setattr(first, "_receive", lambda sources: [sent for _ in sources])
    gc.collect()
    gc.callbacks.append(collected)
    try:
        found = first.gather(None)
    finally:
        gc.callbacks.remove(collected)
    assert found == [None, *[unpack(sent.numpy().tobytes())] * 8]
    assert collections <= 2  # behind the last one
    assert gc.isenabled()
