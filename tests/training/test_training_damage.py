"""A resume from a checkpoint with wrong bytes: it goes into quarantine, and the attempt begins with the one before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.checkpoint_records import quarantined_checkpoints, resume_point
from relayrun.control.rundir.merged_metrics import MergedViews
from relayrun.control.rundir.run import Run
from tests.crafted import in_common, in_metadata, in_object

from .conftest import Harness

pytestmark = pytest.mark.slow


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def zero_header(folder: Path) -> None:
    piece = folder / "__1_0.distcp"
    piece.write_bytes(bytes(4096) + piece.read_bytes()[4096:])


def extra_piece(folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", folder / "__9_0.distcp")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "values": (lambda folder: flip(folder / "__1_0.distcp", 120_000), "are not those that were saved"),
    "metadata": (lambda folder: flip(folder / ".metadata", 2_000), ".metadata is not the one that was saved"),
    "common": (lambda folder: flip(folder / "common.pt", 700), "common.pt is not the one that was saved"),
    "format": (lambda folder: flip(folder / "metadata.json", 20), "metadata.json is not the one that was saved"),
    "index": (lambda folder: flip(folder / "checksums.json", 99), "checksums.json is not the one that was saved"),
    "record": (lambda folder: flip(folder / "__1.checksums.jsonl", 99), "__1.checksums.jsonl is not the one"),
    "lost record": (lambda folder: (folder / "checksums.json").unlink(), "checksums.json is missing"),
    "zeroed header": (zero_header, "__1_0.distcp"),
    "torn": (lambda folder: os.truncate(folder / "__0_0.distcp", 9_999), "__0_0.distcp has 9999 bytes"),
    "missing": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "extra": (extra_piece, "__9_0.distcp does not belong to it"),
}
SHORT = ("values",)
"""The others are cured by the same lines, which `test_checkpoint_checksums` looks at one by one."""


def copied(made: Harness, folder: Path) -> Harness:
    shutil.copytree(made.run.path, folder)
    return Harness(Run(folder), dict(made.config))  # a test may change its own


@pytest.mark.parametrize(
    "kind", [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in DAMAGE]
)
def test_the_attempt_goes_on_from_the_checkpoint_before(trained: Harness, tmp_path: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    made = copied(trained, tmp_path / "run")
    attempt = made.begin()
    damage(made.run.checkpoint(12))  # behind `begin`, which sees sizes: so the ranks meet it themselves
    assert made.start(attempt).wait() == [0, 0], made.attempts[0].output()
    (left,) = quarantined_checkpoints(made.run)
    assert (left.iteration, left.quarantined) == (12, True)
    assert words in left.why
    assert Path(left.path, "common.pt").exists()
    done = made.attempts[0]
    assert f"iteration 12 is damaged: {left.why}" in done.output()
    begin = attempt.read_begin()
    assert begin is not None
    assert (begin.base_iteration, begin.base_path) == (8, str(made.run.checkpoint(8)))
    assert [commit.iteration for commit in done.commits] == [12]
    assert resume_point(made.run).path == str(made.run.checkpoint(12))
    untouched = trained.attempts[0].steps()
    assert list(done.steps()) == [9, 10, 11, 12]
    for number, step in done.steps().items():
        for name in ("loss", "grad_norm", "lr", "consumed_samples"):
            assert step[name] == untouched[number][name], (number, name)


@pytest.mark.long
def test_a_view_that_a_supervisor_keeps_meanwhile_has_no_gap(trained: Harness, tmp_path: Path) -> None:
    """It has read begin.json before the attempt fell back."""
    made = copied(trained, tmp_path / "run")
    attempt = made.begin()
    views = MergedViews(made.run)
    views.update(attempt=2)
    assert [line["iteration"] for line in map(json.loads, made.run.metrics_view.read_text().splitlines())][-1] == 12
    flip(made.run.checkpoint(12) / "common.pt", 700)
    assert made.start(attempt).wait() == [0, 0], made.attempts[0].output()
    views.update(attempt=2)
    lines = [json.loads(line) for line in made.run.metrics_view.read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == list(range(1, 13))


@pytest.mark.long
def test_where_every_checkpoint_is_damaged_the_chain_ends_and_none_is_lost(trained: Harness, tmp_path: Path) -> None:
    made = copied(trained, tmp_path / "run")
    for iteration in (4, 8, 12):
        flip(made.run.checkpoint(iteration) / "common.pt", 700)
    attempt = made.start()
    codes = attempt.wait()
    assert set(codes) == {1}, attempt.output()
    assert attempt.outcome is None, "another node may read better"
    assert "3 checkpoints in a row were read as damaged" in attempt.output()
    assert [left.iteration for left in quarantined_checkpoints(made.run)] == [12, 8]
    again = made.start()
    assert 3 in again.wait(), again.output()
    assert again.outcome is not None
    assert (again.outcome.outcome, again.outcome.iteration) == ("fatal", 4)
    assert "no checkpoint of this run is whole" in again.outcome.reason
    assert [left.iteration for left in quarantined_checkpoints(made.run)] == [12, 8, 4]


@pytest.mark.long
def test_a_checkpoint_of_an_earlier_version_is_loaded_with_a_warning(trained: Harness, tmp_path: Path) -> None:
    made = copied(trained, tmp_path / "run")
    first = made.run.attempt(1)
    old = [replace(commit, checksum=None) for commit in first.read_commits()]
    first.commits.unlink()
    for commit in old:
        for path in Path(commit.path).glob("*checksums.json*"):
            path.unlink()
        first.append_commit(replace(commit, files={}))
    made.config["training"] = made.config["training"] | {"steps": 13}
    attempt = made.train()
    assert attempt.output().count("was saved without checksums: its bytes are taken as they are") == 1
    assert list(attempt.steps()) == [13]


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (in_object, "this checkpoint is not loaded: a block: Weights only load failed"),
        pytest.param(
            in_metadata, "this checkpoint is not loaded: .metadata: it names posix.mkdir", marks=pytest.mark.long
        ),
        pytest.param(in_common, "this checkpoint is not loaded: common.pt: Weights only load", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("foreign", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_crafted_checkpoint_runs_nothing_where_a_run_begins_or_goes_on_with_it(
    trained: Harness, tmp_path: Path, put: Callable[[Path, Path], None], words: str, foreign: bool
) -> None:
    """It is refused, not quarantined: every attempt would meet it, and its bytes are what somebody saved."""
    made = copied(trained, tmp_path / "run")
    folder = made.run.checkpoint(12)
    if foreign:
        folder = Path(shutil.copytree(folder, tmp_path / "others" / "iter_0000012"))
    for path in folder.glob("*checksums.json*"):
        path.unlink()
    put(folder, tmp_path / "was-run")
    commits = made.run.attempt(1).read_commits()
    made.run.attempt(1).commits.unlink()
    for commit in commits[:-1] if foreign else commits:
        made.run.attempt(1).append_commit(replace(commit, files={}, checksum=None))
    made.config["training"] = made.config["training"] | {"steps": 13}
    attempt = made.start(made.begin(base_iteration=12, base_path=str(folder)))
    codes = attempt.wait()
    assert not (tmp_path / "was-run").exists()
    assert 3 in codes, attempt.output()
    assert words in attempt.output()
    assert folder.is_dir()
    assert quarantined_checkpoints(made.run) == []
