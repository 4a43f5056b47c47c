from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.trainers import megatron_lm_log
from relayrun.control.trainers.megatron_lm_log import least_file_sizes
from relayrun.control.trainers.pickle_records import CorruptPickle
from relayrun.control.trainers.torch_files import METADATA_FILE
from relayrun.files import file_sizes


@dataclass(frozen=True)
class Index:
    """The key of a block, as torch has it."""

    fqn: str


@dataclass
class Info:
    """Where a block lies, as torch has it."""

    relative_path: str
    offset: int
    length: int


@dataclass
class Metadata:
    """What torch writes into `.metadata`, as far as it matters here."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Index, Info]


BLOCKS = [Info("__0_0.distcp", 0, 7), Info("__0_0.distcp", 7, 5), Info("__1_0.distcp", 0, 12)]


def save(folder: Path, iteration: int, *, without: str = "", track: bool = True) -> Path:
    """A checkpoint as Megatron leaves it; `without`: a file that is missing."""
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name in (*megatron_lm_log.TORCH_DIST_FILES, "__0_0.distcp", "__1_0.distcp"):
        if name != without:
            (path / name).write_text(f"{name:12}")
    if without != METADATA_FILE:
        metadata = Metadata({}, {Index(str(number)): block for number, block in enumerate(BLOCKS)})
        (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    if track:
        (folder / megatron_lm_log.TRACKER_FILE).write_text(str(iteration))
    return path


def test_what_the_tracker_names_and_what_lies_before_it_counts(tmp_path: Path) -> None:
    assert megatron_lm_log.whole_checkpoints(tmp_path / "none") == []
    for iteration in (5, 10):
        save(tmp_path, iteration)
    save(tmp_path, 15, track=False)  # its save is under way
    save(tmp_path, 7, without="metadata.json", track=False)
    (tmp_path / "iter_0000003").write_text("a file")
    assert [found.iteration for found in megatron_lm_log.whole_checkpoints(tmp_path)] == [5, 10]


def test_a_tracker_of_a_release_names_no_iteration(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / megatron_lm_log.TRACKER_FILE).write_text("release")
    assert megatron_lm_log.tracked_iteration(tmp_path) is None


def test_the_older_format_is_whole_with_a_file_of_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000005"
    for rank in ("mp_rank_00", "mp_rank_01"):
        (path / rank).mkdir(parents=True)
        (path / rank / "model_optim_rng.pt").write_text("x")
    assert megatron_lm_log.checkpoint_fault(path) is None
    (path / "mp_rank_01" / "model_optim_rng.pt").write_text("")
    assert megatron_lm_log.checkpoint_fault(path) == "mp_rank_01/model_optim_rng.pt is missing"


def test_a_torn_folder_goes_to_quarantine_and_the_tracker_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    torn = save(tmp_path, 10, without="common.pt")
    said = megatron_lm_log.prepare_checkpoints(tmp_path, base=5, attempt=3)
    assert (tmp_path / megatron_lm_log.TRACKER_FILE).read_text() == "5"
    assert not torn.exists()
    assert (tmp_path / ".quarantine" / "iter_0000010-0003" / "metadata.json").exists()
    assert "common.pt is missing" in said[0]
    assert "named iteration 10; it names 5 now" in said[1]
    assert megatron_lm_log.prepare_checkpoints(tmp_path, base=5, attempt=4) == []


def test_a_run_that_begins_again_has_no_tracker(tmp_path: Path) -> None:
    save(tmp_path, 5)
    megatron_lm_log.prepare_checkpoints(tmp_path, base=0, attempt=1)
    assert megatron_lm_log.tracked_iteration(tmp_path) is None
    assert megatron_lm_log.all_checkpoints(tmp_path) == []
    assert megatron_lm_log.prepare_checkpoints(tmp_path / "new", base=0, attempt=1) == []


def test_sizes_are_of_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    (path / "more").mkdir()
    (path / "more" / "file").write_text("12345")
    assert file_sizes(path)["more/file"] == 5
    assert len(file_sizes(path)) == 6


def test_every_file_that_the_metadata_names_must_be_there_in_its_length(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    assert megatron_lm_log.checkpoint_fault(path) is None
    os.truncate(path / "__0_0.distcp", 11)
    assert megatron_lm_log.checkpoint_fault(path) == "__0_0.distcp has 11 bytes, not 12"
    (path / "__0_0.distcp").unlink()
    assert megatron_lm_log.checkpoint_fault(path) == "__0_0.distcp is missing"
    assert megatron_lm_log.whole_checkpoints(tmp_path) == []
    assert [found.iteration for found in megatron_lm_log.whole_checkpoints(tmp_path, known={5})] == [5]


def test_a_metadata_that_is_torn_at_any_byte_is_no_metadata(tmp_path: Path) -> None:
    path = save(tmp_path, 5) / METADATA_FILE
    data = path.read_bytes()
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptPickle):
            least_file_sizes(path)
    assert (megatron_lm_log.checkpoint_fault(path.parent) or "").startswith(".metadata cannot be read")


def test_records_of_another_form_name_no_file(tmp_path: Path) -> None:
    """A torch to come may write them in another way: then names and the tracker decide, as for other formats."""
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"blocks": 3}))
    assert least_file_sizes(path) == {}


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_what_somebody_has_made_up_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Metadata({"x": Harm(tmp_path / "harm")}, {Index("0"): BLOCKS[0]})))
    assert least_file_sizes(path) == {"__0_0.distcp": 7}
    assert not (tmp_path / "harm").exists()


def test_torchs_own_format_is_whole_without_the_files_of_megatron(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    for name in ("common.pt", "metadata.json"):
        (path / name).unlink()
    assert megatron_lm_log.checkpoint_fault(path) is None
