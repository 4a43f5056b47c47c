from __future__ import annotations

from pathlib import Path

from relayrun.files import sizes
from relayrun.trainers.megatron_lm import checkpoints


def save(folder: Path, iteration: int, *, without: str = "", track: bool = True) -> Path:
    """A checkpoint as Megatron leaves it; `without`: a file that is missing."""
    path = folder / checkpoints.folder_name(iteration)
    path.mkdir(parents=True)
    for name in (*checkpoints.DISTRIBUTED, "__0_0.distcp"):
        if name != without:
            (path / name).write_text(name)
    if track:
        (folder / checkpoints.TRACKER).write_text(str(iteration))
    return path


def test_what_the_tracker_names_and_what_lies_before_it_counts(tmp_path: Path) -> None:
    assert checkpoints.whole(tmp_path / "none") == []
    for iteration in (5, 10):
        save(tmp_path, iteration)
    save(tmp_path, 15, track=False)  # its save is under way
    save(tmp_path, 7, without="metadata.json", track=False)
    (tmp_path / "iter_0000003").write_text("a file")
    assert [found.iteration for found in checkpoints.whole(tmp_path)] == [5, 10]


def test_a_tracker_of_a_release_names_no_iteration(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / checkpoints.TRACKER).write_text("release")
    assert checkpoints.tracked(tmp_path) is None


def test_the_older_format_is_whole_with_a_file_of_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000005"
    for rank in ("mp_rank_00", "mp_rank_01"):
        (path / rank).mkdir(parents=True)
        (path / rank / "model_optim_rng.pt").write_text("x")
    assert checkpoints.fault(path) is None
    (path / "mp_rank_01" / "model_optim_rng.pt").write_text("")
    assert checkpoints.fault(path) == "mp_rank_01/model_optim_rng.pt is missing"


def test_a_torn_folder_goes_to_quarantine_and_the_tracker_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    torn = save(tmp_path, 10, without="common.pt")
    said = checkpoints.prepare(tmp_path, base=5, attempt=3)
    assert (tmp_path / checkpoints.TRACKER).read_text() == "5"
    assert not torn.exists()
    assert (tmp_path / ".quarantine" / "iter_0000010-0003" / "metadata.json").exists()
    assert "common.pt is missing" in said[0]
    assert "named iteration 10; it names 5 now" in said[1]
    assert checkpoints.prepare(tmp_path, base=5, attempt=4) == []


def test_a_run_that_begins_again_has_no_tracker(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoints.prepare(tmp_path, base=0, attempt=1)
    assert checkpoints.tracked(tmp_path) is None
    assert checkpoints.every(tmp_path) == []
    assert checkpoints.prepare(tmp_path / "new", base=0, attempt=1) == []


def test_sizes_are_of_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    (path / "more").mkdir()
    (path / "more" / "file").write_text("12345")
    assert sizes(path)["more/file"] == 5
    assert len(sizes(path)) == 5
