"""A file of `torch.save` of any origin is values: reading it runs nothing, changes nothing, and stays small."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from relayrun.control.trainers import pickle_records, torch_files
from relayrun.control.trainers.pickle_records import CorruptPickle, PickledCall, PickledName, read_records
from relayrun.control.trainers.torch_files import StoredTensor, read_torch_file, vet_checkpoint
from relayrun.errors import InputError
from tests.crafted import Command, unchanged

PRIME = (1 << 61) - 1
"""Hashes of numbers are remainders by it."""


class Colour(Enum):
    RED = 1


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_pickle_is_read_as_names_and_values() -> None:
    value = {
        "args": Namespace(colour=Colour.RED, dtype=torch.bfloat16, many=(1, [2.5, None]), path=Path("/x")),
        "ordered": OrderedDict(a=1),
        "step": torch.tensor([[1.0, 2.0]]),
        "view": torch.arange(6.0).reshape(2, 3).t(),
        "set": {1, 2},
        "cut": slice(1, 2),
        "numbers": [0, -1, 255, 65535, 1 << 40, -(1 << 70), 1.5, True, False],
    }
    read = read_torch_file(saved(value))
    assert read["args"].many == (1, [2.5, None])
    assert isinstance(read["args"].colour, PickledCall)
    assert str(read["args"].dtype) == "torch.bfloat16"
    assert "Path" in str(read["args"].path)
    assert read["step"] == StoredTensor(dtype="float32", shape=(1, 2), data=torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert read["view"].data == b""
    assert (read["ordered"], read["set"], read["cut"]) == ({"a": 1}, {1, 2}, slice(1, 2))
    assert read["numbers"] == value["numbers"]


def test_a_crafted_file_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "was-run"
    data = saved({"args": Namespace(), "iteration": 1, "more": Command(target)})
    read = read_torch_file(data)
    assert str(read["more"]) == f"posix.mkdir({target})"
    assert not target.exists()
    torch.load(io.BytesIO(data), weights_only=False)
    assert target.is_dir()  # or the test would find nothing


def archive(data: bytes, storage: bytes = b"", **more: bytes) -> bytes:
    """A file of torch.save with this pickle, and a storage 0."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/data/0", storage)
        for name, content in more.items():
            file.writestr(name, content)
    return buffer.getvalue()


def unicode(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Give this process 1 GiB more than it has, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "named",
    [
        "argparse Namespace",
        "collections OrderedDict",
        "builtins set",
        "builtins getattr",
        "torch._utils _rebuild_tensor_v2",
        "relayrun.control.trainers.pickle_records PickledCall",
        "pathlib PosixPath",
    ],
)
def test_a_crafted_file_changes_nothing_that_it_names(named: str) -> None:
    """BUILD gave argparse.Namespace a `__getattribute__`: every option of the process was what the file said."""
    name = b"c" + named.replace(" ", "\n").encode() + b"\n"
    for attribute, value in (("overwrite", b"\x88"), ("__defaults__", b")"), ("__getattribute__", b"cfoo\nBar\n")):
        for state in (b"N}" + unicode(attribute) + value + b"s\x86", b"}" + unicode(attribute) + value + b"s"):
            data = archive(b"\x80\x02" + name + state + b"b0}.")
            with unchanged(data), pytest.raises(CorruptPickle, match="it gives attributes to"):
                read_torch_file(data)
    assert Namespace(overwrite=False).overwrite is False


@pytest.mark.slow
def test_a_crafted_file_stays_small_as_values_and_as_text() -> None:
    mega = 1 << 20
    one = b"(" + unicode("storage") + b"ctorch\nFloatStorage\n" + unicode("0") + unicode("cpu") + b"K\x01tQ"
    view = b"ctorch._utils\n_rebuild_tensor_v2\n(" + one
    part = view + b"K\x01J" + (mega // 4 - 1).to_bytes(4, "little") + b"\x85K\x01\x85tR"
    huge = view + b"K\x00\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85K\x02\x85tR"
    inert = b"ca\nB\nq\x00)Rq\x01" + 40 * b"h\x00h\x01h\x01\x86Rq\x01"
    plain = b"]q\x01" + 40 * b"](h\x01h\x01eq\x01"
    memo = b"Nr\xff\xff\xff\x7f"
    with little_memory():
        found = read_torch_file(archive(b"\x80\x02](" + part * 4000 + b"e.", bytes(mega)))
        assert len({id(each.data.obj) for each in found}) == 1  # the bytes are read once, whatever names them
        assert len(str(read_records(b"\x80\x02" + inert + b".")[0])) < 100
        for data in (inert, plain, huge, memo):
            with pytest.raises(CorruptPickle):
                read_torch_file(archive(b"\x80\x02" + data + b".", bytes(mega)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x96" + (1 << 33).to_bytes(8, "little"),
        b"X" + (1 << 31).to_bytes(4, "little"),
        b"](" + (64 << 20) * b"]" + b"e",
        b"](" + 4_000_000 * b"}" + b"e",
        b"N" + 4_000_000 * b"\x94",
        4_000_000 * b"(",
        b"}N" + 60 * b"2\x86" + b"Ns",
        b"}q\x00N" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(1, 60)) + b"Ns",
        b"}N" + 1_000_000 * b"\x85" + b"Ns",
        b"c__builtin__\nset\n]N" + 1_000_000 * b"\x85" + b"a\x85R",
        b"}(" + b"".join(b"\x8a\x0a" + (n * PRIME).to_bytes(10, "little") + b"N" for n in range(300_000)) + b"u",
    ],
    ids=[
        "bytes that are not there",
        "text that is not there",
        "many lists",
        "many dictionaries",
        "many numbers of one value",
        "many marks",
        "a key by an opcode that copies",
        "a key whose hash never ends",
        "a key that is deep",
        "an item of a set that is deep",
        "keys with one hash",
    ],
)
def test_a_crafted_file_takes_neither_memory_nor_time(opcodes: bytes) -> None:
    """Nested keys ended the process; keys with one hash took hours."""
    with little_memory(), contextlib.suppress(CorruptPickle):
        found = read_torch_file(archive(b"\x80\x05" + opcodes + b"."))
        assert found is None or isinstance(found, list)


def test_a_record_that_holds_itself_is_read() -> None:
    value = Namespace(many=[1])
    value.many.append(value)
    assert read_torch_file(saved(value)).many[0] == 1


def test_no_attribute_of_a_real_thing_is_reached() -> None:
    """getattr is for members of an enumeration alone; the result is neither called nor changed."""

    class Reach:
        def __reduce__(self) -> Any:
            return getattr, (Namespace(), "__class__")

    with pytest.raises(CorruptPickle, match="asks for an attribute of something"):
        read_torch_file(saved(Reach()))
    member = b"cbuiltins\ngetattr\ncpathlib\nPosixPath\n" + unicode("write_text") + b"\x86R"
    assert str(read_records(b"\x80\x02" + member + b".")[0]) == "pathlib.PosixPath.write_text"
    for more in (b")R", b")\x81", b"}b", b"N}\x86b"):
        with pytest.raises(CorruptPickle, match=r"it calls something|it gives attributes"):
            read_records(b"\x80\x02" + member + more + b".")


def test_whatever_is_no_such_file_is_unreadable() -> None:
    whole = saved({"step": torch.ones(3)})
    for data in (b"", b"x" * 100, whole[: len(whole) // 2], os.urandom(200), archive(b"\x80\x02.")):
        with pytest.raises(CorruptPickle):
            read_torch_file(data)


def moved_directory(data: bytes) -> bytes:
    """The directory of another archive before this one's: torch goes to the offset, Python looks before the end."""
    at = struct.unpack("<I", data[-6:-2])[0]
    return data[:at] + data[at:-22] + data[at:]


@pytest.mark.parametrize(
    "data",
    [
        b"#" + archive(b"\x80\x02N."),
        archive(b"\x80\x02N.") + b"#",
        moved_directory(archive(b"\x80\x02N.")),
        archive(b"\x80\x02N.", **{"x/DATA.PKL": b""}),
        archive(b"\x80\x02N.", **{"y/data.pkl": b""}),
        archive(b"\x80\x02N.", **{"x/constants.pkl": b""}),
        archive(b"\x80\x02N.", **{"x/../data": b""}),
    ],
    ids=["before", "after", "two directories", "two pickles", "two roots", "a program of TorchScript", "a name"],
)
def test_an_archive_that_torch_may_read_otherwise_is_refused(data: bytes) -> None:
    assert read_torch_file(archive(b"\x80\x02N.")) is None
    with pytest.raises(CorruptPickle):
        read_torch_file(data)


def test_a_compressed_archive_is_refused() -> None:
    """20 KB held 20 MB."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", b"\x80\x02N.")
        file.writestr("x/data/0", bytes(20 << 20))
    with pytest.raises(CorruptPickle, match="not as torch"):
        read_torch_file(buffer.getvalue())


def checkpoint(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True)
    for name, value in files.items():
        path = folder / f"{name}.pt"
        path.write_bytes(value if isinstance(value, bytes) else saved(value))
    return folder


def test_a_checkpoint_of_values_alone_is_vetted(tmp_path: Path) -> None:
    values = {
        "args": Namespace(dtype=torch.bfloat16, path=Path("/x")),
        "generator": [torch.get_rng_state(), np.random.get_state()],
        "packed": io.BytesIO(b"x"),
        "bytes": b"x",
        "weight": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "size": torch.Size([1]),
    }
    vet_checkpoint(checkpoint(tmp_path / "iter_0000001", common=values))


@pytest.mark.parametrize("text", [b"\x80\x02csignal\nSIGUSR2\n.", b"\x80\x02csignal\nSignals\nK\x0c\x85R."])
def test_a_signal_of_the_arguments_is_a_value_in_both_spellings(tmp_path: Path, text: bytes) -> None:
    """`--exit-signal SIGUSR2`: pickle names the constant in Python 3.10 and 3.11.2, the enumeration in 3.12."""
    vet_checkpoint(checkpoint(tmp_path / "iter_0000001", common=archive(text)))


def test_ranks_get_no_checkpoint_that_names_more(tmp_path: Path) -> None:
    for number, more in enumerate((Command(tmp_path / "was-run"), [Colour.RED], b"cos\nsystem\n.")):
        folder = checkpoint(tmp_path / f"iter_{number:07}", model_optim_rng={"args": 1}, rank=more)
        with pytest.raises(InputError, match=r"this checkpoint is not loaded: rank\.pt: it "):
            vet_checkpoint(folder)


def test_an_enumeration_of_the_checkout_is_a_value(tmp_path: Path) -> None:
    """A fork has its own; a class with code of its own is none."""
    package = tmp_path / "checkout" / "fork"
    package.mkdir(parents=True)
    text = "import enum\nclass Kind(enum.Enum):\n    A = 1\nclass Code:\n    pass\n"
    text += "@dataclass\nclass Plain:\n    a: int\n@dataclass\nclass Own:\n    def __setstate__(self, state): ...\n"
    (package / "kinds.py").write_text(text)
    known = {name: torch_files._is_value(PickledName("fork.kinds", name), package.parent) for name in KINDS}
    assert known == KINDS
    assert not any(torch_files._is_value(PickledName("fork.kinds", name), None) for name in KINDS)


KINDS = {"Kind": True, "Code": False, "Plain": True, "Own": False, "enum": False, "missing": False}


def test_no_name_of_torch_that_runs_something_is_a_value() -> None:
    for name in ("load", "compile", "_dynamo", "classes", "hub", "_load_from_bytes", "StorageX.y"):
        assert not torch_files._is_value(PickledName("torch", name), None), name
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "uint8", "complex64", "bool", "device", "HalfStorage"):
        assert hasattr(torch, name)
        assert torch_files._is_value(PickledName("torch", name), None), name
    assert pickle_records.MOST_DEEP < 1000


def packed_states(state: Any) -> dict[str, Any]:
    """A state as TransformerEngine packs it, by its versions."""
    data = pickle.dumps(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {
        "tensor": torch.frombuffer(bytearray(data), dtype=torch.uint8),
        "of file": torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8),
        "buffer": io.BytesIO(data),
        "file": buffer,
        "as another type": torch.frombuffer(bytearray(data).ljust(len(data) + -len(data) % 8, b"."), dtype=torch.int64),
    }


def extra_state(tmp_path: Path, value: Any, how: str) -> Path:
    """A checkpoint with a state as an object of `.metadata`, or in a file of a rank."""
    if how == "rank":
        return checkpoint(tmp_path / "iter_1", rank=OrderedDict({"model": OrderedDict({"a._extra_state": value})}))
    folder = checkpoint(tmp_path / "iter_1")
    data = saved(value)
    (folder / "__0_0.distcp").write_bytes(data)
    key = "decoder.layers.a._extra_state/shard_0_2"
    place = {MetadataIndex(key): _StorageInfo("__0_0.distcp", 0, len(data))}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({key: BytesStorageMetadata()}, None, place)))
    return folder


@pytest.mark.parametrize("how", ["object", "rank"])
@pytest.mark.parametrize("form", ["tensor", "of file", "buffer", "file", "as another type"])
def test_a_state_of_transformer_engine_is_vetted_in_its_bytes(tmp_path: Path, how: str, form: str) -> None:
    good = {"scale_fwd": torch.ones(3), "amax_history_bwd": torch.zeros(2, 3), "extra": {"fp8": True, "names": ("a",)}}
    vet_checkpoint(extra_state(tmp_path / "good", packed_states(good)[form], how))
    deep = {"recipe": Packed(tmp_path / "was-run")}
    for number, bad in enumerate((good | {"recipe": Command(tmp_path / "was-run")}, deep)):
        with pytest.raises(InputError, match=r"posix\.system|it names|calls|another form"):
            vet_checkpoint(extra_state(tmp_path / f"bad{number}", packed_states(bad)[form], how))
    assert not (tmp_path / "was-run").exists()


class Packed:
    """A tensor as `pickle` writes it, whose bytes torch unpickles again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        torch.save(Command(self.path), buffer, _use_new_zipfile_serialization=False)
        return torch.storage._load_from_bytes, (buffer.getvalue(),)


@pytest.mark.parametrize("value", [torch.ones(4, 4, dtype=torch.uint8).t()[1:], torch.ones(3).to_sparse(), [1], None])
def test_a_state_in_another_form_is_refused_or_holds_no_bytes(tmp_path: Path, value: Any) -> None:
    folder = extra_state(tmp_path, value, "object")
    if isinstance(value, torch.Tensor):
        with pytest.raises(InputError, match="is not loaded"):
            vet_checkpoint(folder)
    else:
        vet_checkpoint(folder)
