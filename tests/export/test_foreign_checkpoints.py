"""A checkpoint of another origin runs nothing: not where it is exported, nor where a run begins with it."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from enum import EnumType
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

from relayrun.cli import main
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm_log import checkpoint_fault
from relayrun.control.trainers.torch_files import MEGATRON_METADATA, METADATA_NAMES
from relayrun.errors import RelayrunError
from relayrun.files import append_line
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import DamagedCheckpoint
from relayrun.train.checkpoint.reader import CheckedReader, RefusedCheckpoint, parse_metadata, read_metadata
from tests import warm
from tests.crafted import PLACES, in_common, in_metadata, unchanged

from .models import Imported, make_hf, make_run


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("imported")
    return make_run(folder / "run", make_hf(folder / "hf"))


def crafted(imported: Imported, folder: Path, put: Callable[[Path, Path], None], *, with_hashes: bool) -> Path:
    """A copy of the run whose checkpoint runs a command, without hashes, or with hashes that fit."""
    shutil.copytree(imported.run.path, folder)
    run = Run(folder)
    checkpoint = run.checkpoint(7)
    put(checkpoint, folder / "was-run")
    for path in checkpoint.glob("*checksums.json*"):
        path.unlink()
    root = checksums.write_checksum_index(checkpoint, 7, {}) if with_hashes else None
    (commit,) = run.attempt(1).read_commits()
    run.attempt(1).commits.unlink()
    append_line(run.attempt(1).commits, asdict(commit) | {"checksum": root, "files": {}})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("with_hashes", [False, True])
@pytest.mark.parametrize("put", PLACES)
def test_a_crafted_checkpoint_runs_nothing_where_it_is_exported(
    imported: Imported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    put: Callable[[Path, Path], None],
    with_hashes: bool,
) -> None:
    folder = crafted(imported, tmp_path / "run", put, with_hashes=with_hashes)
    code = main(["export", "hf", str(folder), "--output", str(tmp_path / "hf")])
    said = capsys.readouterr().err
    assert not (folder / "was-run").exists()
    assert (tmp_path / "hf").exists() == (code == 0)
    if put is in_metadata:  # an export looks at no other
        assert code == 1
        assert said.startswith("error: ")
        assert "this checkpoint is not loaded: .metadata: it names posix.mkdir, which is no part of a check" in said
        assert "safetensors" in said


def test_the_crafted_ones_do_run_it_where_nobody_looks(imported: Imported, tmp_path: Path) -> None:
    """Or the tests above would find nothing."""
    for number, put in enumerate(PLACES):
        folder = crafted(imported, tmp_path / str(number), put, with_hashes=False) / "checkpoints" / "iter_0000007"
        target = tmp_path / str(number) / "was-run"
        if put is in_metadata:
            pickle.loads((folder / ".metadata").read_bytes())
        elif put is in_common:
            torch.load(folder / "common.pt", weights_only=False)
        else:
            item = next(v for k, v in read_metadata(folder).storage_data.items() if "_extra_state" in k.fqn)
            data = (folder / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
            torch.load(io.BytesIO(data), weights_only=False)
        assert target.is_dir()


@pytest.mark.parametrize(
    "named",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch._dynamo",
        "torch._inductor.codecache",
        "torch.serialization.load",
        "subprocess.run",
        "pathlib.Path.write_text",
    ],
)
def test_only_records_can_be_named(tmp_path: Path, named: str) -> None:
    module, _, name = named.rpartition(".")
    data = b"c" + module.encode() + b"\n" + name.encode() + b"\n."
    with unchanged(data), pytest.raises(RefusedCheckpoint, match=f"it names {named}, which is no part of a checkpoint"):
        parse_metadata(data, tmp_path)


NAMED = sorted(METADATA_NAMES.keys() - {MEGATRON_METADATA})
"""Modules of torch's records; Megatron-LM's two are read as torch's."""


def build(named: str, state: bytes) -> bytes:
    """A pickle that gives a state, made by these opcodes, to what it names; then an empty dictionary."""
    return b"\x80\x02c" + "\n".join(named.rsplit(".", 1)).encode() + b"\n" + state + b"b0}."


def unicode(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


SLOTS = b"N}" + unicode("__doc__") + unicode("another") + b"s\x86"
"""Attributes that the opcode BUILD sets one by one: (None, {"__doc__": "another"})."""
ENTRIES = b"}" + unicode("__doc__") + unicode("another") + b"s"
"""And those that it puts into the object's dictionary."""


@pytest.mark.parametrize("state", [SLOTS, ENTRIES], ids=["slots", "entries"])
@pytest.mark.parametrize(
    "named",
    [
        "builtins.getattr",
        "torch.bfloat16",
        *[f"{module}.{name}" for module in NAMED for name in sorted(METADATA_NAMES[module])],
    ],
)
def test_nothing_that_is_named_is_changed(tmp_path: Path, named: str, state: bytes) -> None:
    """BUILD on pathlib.PosixPath made every path of the process the attacker's: an export deleted a folder."""
    module, _, name = named.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError):
        real = getattr(importlib.import_module(module), name)
        members = list(real) if isinstance(real, EnumType) else []
        before = [each.__doc__ for each in (real, *members)]
        calls = [b"K" + bytes([member.value]) + b"\x85R" for member in members]
        for call in (b"", *calls):  # the enumeration, and each of its members
            with unchanged(named.encode()), pytest.raises((RefusedCheckpoint, DamagedCheckpoint)):
                parse_metadata(build(named, call + state), tmp_path)
        assert [each.__doc__ for each in (real, *members)] == before


def test_a_crafted_metadata_leaves_paths_as_they_were_and_deletes_no_folder(imported: Imported, tmp_path: Path) -> None:
    """In a process of its own: where it fails, paths of the process that looks are another one's."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("two weeks of work")
    slots = b"N}" + unicode("_str") + unicode(str(victim)) + b"s\x86"

    def put(checkpoint: Path, _: Path) -> None:
        data = (checkpoint / ".metadata").read_bytes()
        (checkpoint / ".metadata").write_bytes(data[:2] + build("pathlib.PosixPath", slots)[2:-2] + data[2:])

    run = crafted(imported, tmp_path / "run", put, with_hashes=False)
    words = [sys.executable, "-m", "relayrun", "export", "hf", str(run), "--output", str(tmp_path / "out")]
    done = warm.run(words)
    assert (victim / "thesis.txt").exists(), done.stderr
    assert done.returncode == 1
    assert "this checkpoint is not loaded: .metadata: it gives attributes to pathlib.PosixPath" in done.stderr


def test_a_name_that_hides_behind_an_allowed_one_is_not_found(tmp_path: Path) -> None:
    """Protocol 4 takes dotted names: `StorageMeta.__init__.__globals__` would be a way out."""
    module, name = b"torch.distributed.checkpoint.metadata", b"StorageMeta.__init__"
    text = b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name))
    data = b"\x80\x04" + text + b"\x93."
    with pytest.raises(RelayrunError, match="which is no part of a checkpoint"):
        parse_metadata(data, tmp_path)


def test_members_of_enumerations_as_early_python_3_11_writes_them_are_read(
    imported: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.11.0 to 3.11.3, that of Debian 12: or each save would be refused, since it is read back."""
    metadata = read_metadata(imported.checkpoint)
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)), raising=False
    )
    data = pickle.dumps(metadata)
    assert b"getattr" in data
    assert parse_metadata(data, tmp_path) == metadata


class _Attribute:
    """What is pickled as an attribute of something."""

    def __init__(self, owner: type, name: str) -> None:
        self._named = owner, name

    def __reduce__(self) -> Any:
        return getattr, self._named


@pytest.mark.parametrize(
    ("owner", "name"),
    [(StorageMeta, "__init__"), (_MEM_FORMAT_ENCODING, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")],
)
def test_no_other_attribute_is_given(tmp_path: Path, owner: type, name: str) -> None:
    with pytest.raises(RefusedCheckpoint, match=r"it asks for an attribute of something|which is no part of a"):
        parse_metadata(pickle.dumps(_Attribute(owner, name)), tmp_path)


@pytest.mark.parametrize("path", ["../../secret", "/etc/hostname", "", ".."])
def test_a_block_outside_the_checkpoint_is_refused(imported: Imported, tmp_path: Path, path: str) -> None:
    metadata = read_metadata(imported.checkpoint)
    next(iter(metadata.storage_data.values())).relative_path = path
    data = pickle.dumps(metadata)
    with pytest.raises(RefusedCheckpoint, match="it names a file outside the checkpoint"):
        parse_metadata(data, tmp_path)
    (tmp_path / ".metadata").write_bytes(data)
    assert "outside the checkpoint" in (checkpoint_fault(tmp_path) or "")


def test_a_record_with_values_of_another_type_is_refused(imported: Imported, tmp_path: Path) -> None:
    """Readers take these types for granted."""
    for change in (
        lambda found: found.storage_data.update({"key": "value"}),
        lambda found: found.state_dict_metadata.update({"key": "value"}),
        lambda found: vars(found).update(planner_data={(1, 2): 3}),
        lambda found: vars(next(iter(found.storage_data.values()))).update(length=-1),
        lambda found: vars(next(iter(found.storage_data))).update(fqn=((1,),)),
    ):
        metadata = read_metadata(imported.checkpoint)
        change(metadata)
        with pytest.raises((RefusedCheckpoint, DamagedCheckpoint)):
            parse_metadata(pickle.dumps(metadata), tmp_path)


def test_what_relayrun_imports_has_hashes(imported: Imported) -> None:
    assert CheckedReader(imported.checkpoint, None).checked
    assert checksums.verify_checkpoint(imported.checkpoint, None)[1] == []
