"""Copies of checkpoints in a second place: what is claimed is there, whatever is cut, full, slow or wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.cli.model import checkpoint as command
from relayrun.control.rundir import mirror as records
from relayrun.control.rundir import records as every_record
from relayrun.control.rundir.checkpoint_records import newest_commit_at, resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RunDirError
from relayrun.files import file_sizes
from relayrun.train.checkpoint import checksums, publish
from relayrun.train.mirror import destination, restore, sync
from relayrun.trust import UntrustedError
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.history import began
from tests.mirrored import SIZE, Mirrored, digest, flip
from tests.owners import give_away
from tests.waiting import wait_for


@pytest.fixture
def mirrored(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mirrored:  # noqa: F811
    monkeypatch.setattr(destination, "COPY_PIECE_BYTES", 700)
    made = Mirrored(make_run, tmp_path)
    for iteration in (10, 20, 30):
        made.save(iteration)
    made.remember()
    return made


@contextmanager
def each_piece(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the bytes of each piece that a pass copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destination, "count", act)
        yield


# what is copied, and what stays


def test_the_newest_are_copied_and_verified_first(mirrored: Mirrored) -> None:
    assert mirrored.sync() == ["copied iteration 30", "copied iteration 20"]
    assert mirrored.claimed() == [20, 30]
    assert mirrored.sync() == []
    mirrored.save(40)
    mirrored.remember()
    assert mirrored.sync() == ["copied iteration 40", "removed iteration 20"]
    assert mirrored.claimed() == [30, 40]
    assert sorted(path.name for path in mirrored.place.iterdir()) == [
        ".staging",
        "copies.jsonl",
        "iter_0000030",
        "iter_0000040",
        "mirror.json",
    ]


def test_multiples_stay_by_a_rule_of_its_own(mirrored: Mirrored) -> None:
    mirrored.policy(keep_last=1, keep_every=20)
    mirrored.sync()
    assert mirrored.claimed() == [20, 30]
    mirrored.save(50)
    mirrored.remember()
    mirrored.sync()
    assert mirrored.claimed() == [20, 50]


def test_what_was_computed_again_is_copied_again(mirrored: Mirrored) -> None:
    mirrored.sync()
    began(mirrored.run, 2, base=10)
    for iteration in (20, 30):
        shutil.rmtree(mirrored.run.checkpoint(iteration))
        staged = publish.prepare_staging(mirrored.run, 2, iteration)
        (staged / "data").write_bytes(b"anew")
        root = checksums.write_checksum_index(staged, iteration, {})
        path = str(mirrored.run.checkpoint(iteration))
        commit = CheckpointCommit(iteration=iteration, path=path, consumed_samples=1, time=time.time(), seconds=1.0)
        publish.publish_checkpoint(mirrored.run, 2, replace(commit, files=file_sizes(staged), checksum=root), staged)
        if iteration == 20:  # the copies of the line that was left stay until this one is beyond them
            mirrored.sync()
            mirrored.remember()
            assert 30 in {copy.iteration for copy in records.read_copies(mirrored.place).values()}
    mirrored.remember()
    mirrored.sync()
    assert mirrored.claimed() == [20, 30]


@pytest.mark.parametrize("file", [False, True], ids=["a folder", "a file"])
def test_a_checkpoint_without_hashes_is_compared_with_its_copy(mirrored: Mirrored, file: bool) -> None:
    mirrored.save_without_hashes(40, file=file)
    mirrored.remember()
    assert mirrored.sync() == ["copied iteration 40", "copied iteration 30"]
    assert mirrored.claimed() == [30, 40]
    copy = records.read_copies(mirrored.place)["iter_0000040"]
    assert set(copy.hashes) == set(copy.files)
    target = mirrored.place / "iter_0000040"
    flip(target if file else target / "common.pt")
    done = sync.mirror_checkpoints(mirrored.run, verify=True)
    assert "the copy of iteration 40 is damaged" in done.complaints[0]
    assert mirrored.claimed() == [30, 40]


# cut


class Cut(BaseException):
    """A kill, as far as a process can do it to itself."""


@contextmanager
def cut_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Cut before the call of this number, of those that change something, or before a piece of a copy."""
    calls: list[str] = []

    def counted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            calls.append(name)
            if len(calls) == number:
                raise Cut
            return call(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for module, name in (
            (os, "rename"),
            (os, "fsync"),
            (os, "unlink"),
            (shutil, "rmtree"),
            (every_record, "append_line"),
        ):
            patch.setattr(module, name, counted(name, getattr(module, name)))
        patch.setattr(destination, "count", counted("count", destination.count))
        yield calls


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.slow)])
def test_a_pass_that_is_cut_anywhere_claims_nothing_that_is_not_there(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    mirrored.sync()
    mirrored.save(40)
    mirrored.remember()
    before = mirrored.place.with_name("before")
    shutil.copytree(mirrored.place, before)
    with cut_at(0, monkeypatch) as calls:
        mirrored.sync()
    assert {"rename", "fsync", "rmtree", "append_line", "count"} <= set(calls)
    for number in range(1, len(calls) + 1, every):
        shutil.rmtree(mirrored.place)
        shutil.copytree(before, mirrored.place)
        with cut_at(number, monkeypatch), pytest.raises(Cut):
            mirrored.sync()
        assert set(mirrored.claimed()) >= {30}  # the last verified one, whatever happens
        mirrored.sync()
        assert mirrored.claimed() == [30, 40]
        assert not list((mirrored.place / ".staging").iterdir())


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_where_it_was(mirrored: Mirrored) -> None:
    monitored = mirrored.place / ".staging/iter_0000030/common.pt"
    program = "import sys; from relayrun.train.mirror import destination; destination.COPY_PIECE_BYTES = 100; " + (
        "import time; destination.count = lambda size: time.sleep(1); "
        "from relayrun.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, "checkpoint", "mirror", str(mirrored.run.path)])
    wait_for(lambda: monitored.exists() and monitored.stat().st_size)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < monitored.stat().st_size < SIZE
    done = sum(file_sizes(mirrored.place / ".staging/iter_0000030").values())
    assert records.read_copies(mirrored.place) == {}
    mirrored.policy()
    paces: list[int] = []

    def counted(size: int) -> None:
        paces.append(size)

    with each_piece(counted):
        assert mirrored.sync()[0] == "copied iteration 30"
    assert sum(paces) == sum(sum(file_sizes(mirrored.run.checkpoint(each)).values()) for each in (20, 30)) - done
    assert mirrored.claimed() == [20, 30]


# full


def test_a_full_place_claims_nothing_and_goes_on_when_there_is_room(mirrored: Mirrored) -> None:
    """A limit on the size of files stands for the full disk: the write itself fails, in the middle of a file."""
    mirrored.sync()
    mirrored.save(40)
    mirrored.remember()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        done = sync.mirror_checkpoints(mirrored.run)
        assert [os.strerror(errno.EFBIG) in each for each in done.complaints] == [True]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert mirrored.claimed() == [20, 30]
    last = records.MirrorPass.read(mirrored.run.mirror_pass)
    assert last is not None
    assert (last.iteration, last.behind) == (30, 1)
    assert os.strerror(errno.EFBIG) in (last.complaint or "")
    assert mirrored.sync()[0] == "copied iteration 40"
    assert mirrored.claimed() == [30, 40]


# slow


def test_a_slow_copy_keeps_its_checkpoint_from_the_rules_of_the_run(mirrored: Mirrored) -> None:
    """Training saves on meanwhile, and keeps but one."""
    saved: list[int] = []

    def slow(size: int) -> None:
        if len(saved) < 5:
            saved.append(40 + 10 * len(saved))
            mirrored.save(saved[-1], keep_last=1)
            assert mirrored.run.checkpoint(30).is_dir()

    whole = mirrored.known
    with each_piece(slow):
        mirrored.sync()
    assert saved == [40, 50, 60, 70, 80]
    mirrored.remember()
    mirrored.known |= whole
    assert mirrored.claimed()[-1] == 80
    mirrored.save(90, keep_last=1)
    assert sorted(path.name for path in mirrored.run.checkpoints.glob("iter_*")) == ["iter_0000080", "iter_0000090"]


def test_a_checkpoint_that_goes_away_is_left_and_the_next_one_copied(mirrored: Mirrored) -> None:
    def away(size: int) -> None:
        shutil.rmtree(mirrored.run.checkpoint(30), ignore_errors=True)

    with each_piece(away):
        done = sync.mirror_checkpoints(mirrored.run)
    assert "cannot be read: No such file or directory" in done.complaints[0]
    assert 20 in mirrored.claimed()
    assert 30 not in mirrored.claimed()


# corrupted


def test_a_copy_that_is_wrong_on_its_way_is_copied_again(mirrored: Mirrored) -> None:
    flipped: list[Path] = []

    def wrong(size: int) -> None:
        for path in (mirrored.place / ".staging").glob("*/common.pt"):
            if not flipped and path.stat().st_size == SIZE:
                flip(path)
                flipped.append(path)

    with each_piece(wrong):
        assert mirrored.sync() == ["copied iteration 30", "copied iteration 20"]
    assert len(flipped) == 1
    assert mirrored.claimed() == [20, 30]


def test_a_place_that_is_always_wrong_has_no_copies(mirrored: Mirrored) -> None:
    def wrong(size: int) -> None:
        for path in (mirrored.place / ".staging").glob("*/common.pt"):
            if path.stat().st_size == SIZE:
                path.write_bytes(b"x" * SIZE)

    with each_piece(wrong):
        done = sync.mirror_checkpoints(mirrored.run)
    assert len(done.complaints) == 2
    assert "is not what was saved, 2 times: common.pt is not the one that was saved" in done.complaints[0]
    assert records.read_copies(mirrored.place) == {}


def test_a_copy_that_goes_bad_is_taken_back_and_made_anew(mirrored: Mirrored) -> None:
    mirrored.sync()
    (mirrored.place / "iter_0000020/common.pt").write_bytes(b"short")  # its size tells
    flip(mirrored.place / "iter_0000030/common.pt")  # its bytes alone do
    done = sync.mirror_checkpoints(mirrored.run, verify=True)
    assert sorted(each.split(":")[0] for each in done.complaints) == [
        "the copy of iteration 20 is damaged",
        "the copy of iteration 30 is damaged",
    ]
    assert mirrored.claimed() == [20, 30]
    assert sorted(path.name for path in (mirrored.place / ".damaged").iterdir()) == ["iter_0000020", "iter_0000030"]


def test_a_damaged_checkpoint_is_not_copied_and_takes_no_good_copy_away(mirrored: Mirrored) -> None:
    mirrored.policy(keep_last=1)
    mirrored.sync()
    mirrored.save(40)
    flip(mirrored.run.checkpoint(40) / "common.pt")
    done = sync.mirror_checkpoints(mirrored.run)
    (complaint,) = done.complaints
    assert f"{mirrored.run.checkpoint(40)}: it is damaged: common.pt is not the one that was saved" in complaint
    assert mirrored.claimed() == [30]


# the last verified one


def test_no_rule_of_the_run_removes_the_last_verified_one(mirrored: Mirrored) -> None:
    assert main(["checkpoint", "verify", f"{mirrored.run.path}:20"]) == 0
    for iteration in (40, 50, 60):
        mirrored.save(iteration, keep_last=1)
    assert sorted(path.name for path in mirrored.run.checkpoints.glob("iter_*")) == ["iter_0000020", "iter_0000060"]
    assert main(["checkpoint", "verify", str(mirrored.run.path)]) == 0
    mirrored.save(70, keep_last=1)
    assert sorted(path.name for path in mirrored.run.checkpoints.glob("iter_*")) == ["iter_0000060", "iter_0000070"]


def test_a_damaged_record_fails_no_save_and_removes_nothing(mirrored: Mirrored) -> None:
    (mirrored.run.mirror / "verified.jsonl").write_text('{"iteration": 20}\n')
    mirrored.save(40, keep_last=1)
    assert len(list(mirrored.run.checkpoints.glob("iter_*"))) == 4


def test_no_rule_of_the_copies_removes_the_newest_while_another_is_not_whole(mirrored: Mirrored) -> None:
    mirrored.sync()
    mirrored.policy(keep_last=1)
    shutil.rmtree(mirrored.place / "iter_0000030")
    for iteration in (20, 30):
        shutil.rmtree(mirrored.run.checkpoint(iteration))
    sync.mirror_checkpoints(mirrored.run)
    assert 20 in mirrored.claimed()


# back


def test_a_run_that_lost_its_checkpoints_gets_them_back(mirrored: Mirrored, capsys: pytest.CaptureFixture[str]) -> None:
    mirrored.sync()
    known = mirrored.known
    mirrored.lose()
    with pytest.raises(RunDirError, match="no checkpoint of this run is whole"):
        resume_point(mirrored.run)
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 0
    said = capsys.readouterr().out
    assert "restored iteration 30: " in said
    assert f"go on: relayrun resume {mirrored.run.path}" in said
    assert digest(mirrored.run.checkpoint(30)) == known[30]
    assert resume_point(mirrored.run).iteration == 30
    commit = newest_commit_at(mirrored.run.checkpoint(30))
    assert commit is not None
    assert checksums.verify_checkpoint(mirrored.run.checkpoint(30), commit.checksum)[1] == []
    assert main(["checkpoint", "restore", f"{mirrored.run.path}:20"]) == 0
    assert digest(mirrored.run.checkpoint(20)) == known[20]


def test_a_damaged_copy_is_not_put_back_and_the_one_before_is(
    mirrored: Mirrored, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrored.sync()
    known = mirrored.known
    flip(mirrored.place / "iter_0000030/common.pt")
    mirrored.lose()
    assert main(["checkpoint", "restore", f"{mirrored.run.path}:30"]) == 1
    assert "the copy of iteration 30 is damaged: common.pt is not the one" in capsys.readouterr().err
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 0
    said = capsys.readouterr().out
    assert "not restored: " in said
    assert "restored iteration 20: " in said
    assert digest(mirrored.run.checkpoint(20)) == known[20]
    assert resume_point(mirrored.run).iteration == 20


def test_a_torn_one_stays_beside_what_takes_its_place(mirrored: Mirrored) -> None:
    mirrored.sync()
    (mirrored.run.checkpoint(30) / "common.pt").write_bytes(b"torn")
    assert "restored iteration 30" in restore.restore_copy(mirrored.run, None)[0]
    assert (mirrored.run.checkpoints / ".superseded/iter_0000030-torn/common.pt").read_bytes() == b"torn"


def test_what_cannot_be_restored_is_one_error(mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored.sync()
    with pytest.raises(InputError, match="there is nothing to restore"):
        restore.restore_copy(mirrored.run, None)
    with pytest.raises(InputError, match="no copy of iteration 10") as error:
        restore.restore_copy(mirrored.run, 10)
    assert error.value.hint == "copies that count: 20, 30"
    mirrored.lose()
    monkeypatch.setattr(
        command.run_status, "read_run_status", lambda *_, **__: type("Running", (), {"state": "running"})()
    )
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 1
    assert not list(mirrored.run.checkpoints.glob("iter_*"))


# the place


def test_the_place_of_another_run_is_refused(mirrored: Mirrored) -> None:
    mirrored.sync()
    mirrored.policy(id="4567")
    with pytest.raises(RunDirError, match="holds the copies of another run"):
        sync.mirror_checkpoints(mirrored.run)
    last = records.MirrorPass.read(mirrored.run.mirror_pass)
    assert last is not None
    assert "holds the copies of another run" in (last.complaint or "")


@pytest.mark.parametrize("name", ["", ".staging", ".removing", "mirror.json", "copies.jsonl"])
@pytest.mark.parametrize("fault", ["theirs", "writable", "link"])
def test_a_place_through_which_others_lead_the_copies_elsewhere_is_refused(
    mirrored: Mirrored, name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder for everybody, as scratch is: they make the place before its first pass."""
    path, words = tmp_path / "mine", mirrored.place / name
    mirrored.place.parents[1].chmod(0o1777)
    if name in ("", ".staging", ".removing"):
        path.mkdir()
    else:
        path.write_text('{"id": "0123", "run": "/other"}' * (name == "mirror.json"))
    words.parent.mkdir(parents=True, exist_ok=True)
    if fault == "link":
        words.symlink_to(path)
    else:
        path.rename(words)
    words.chmod(0o777 if fault == "writable" else 0o755)
    if fault == "theirs":
        give_away(monkeypatch, words)
    before = {each.name: each.lstat().st_mtime_ns for each in tmp_path.rglob("*") if "second" in str(each)}
    mirrored.save(10)
    said = {"theirs": "this belongs to", "writable": "may write this", "link": "this is a link"}[fault]
    with pytest.raises(UntrustedError, match=said):
        mirrored.sync()
    assert before == {each.name: each.lstat().st_mtime_ns for each in tmp_path.rglob("*") if "second" in str(each)}


def test_in_shared_storage_the_place_is_this_users_own(mirrored: Mirrored) -> None:
    mirrored.place.parents[1].chmod(0o2775)
    mirrored.place.parent.mkdir(mode=0o2775)
    before = os.umask(0o002)
    try:
        mirrored.save(10)
        mirrored.sync()
        mirrored.save(20)
        mirrored.sync()
    finally:
        os.umask(before)
    assert mirrored.place.stat().st_mode & 0o7777 == 0o2755
    mirrored.place.parents[1].chmod(0o777)
    with pytest.raises(UntrustedError, match="everybody may rename what lies here"):
        mirrored.sync()


def test_a_copied_run_directory_does_not_take_the_copies_over_and_a_moved_one_does(mirrored: Mirrored) -> None:
    mirrored.sync()
    twin = Run(mirrored.run.path.with_name("twin"))
    shutil.copytree(mirrored.run.path, twin.path)
    with pytest.raises(UntrustedError, match="this is a copy of a run directory"):
        sync.mirror_checkpoints(twin)
    Plan.load(mirrored.run).write(twin.plan)
    with pytest.raises(RunDirError, match="holds the copies of another run"):
        sync.mirror_checkpoints(twin)
    shutil.rmtree(mirrored.run.path)
    assert sync.mirror_checkpoints(twin).complaints == []


def test_a_place_that_is_away_is_not_begun_anew(mirrored: Mirrored, tmp_path: Path) -> None:
    """An empty mount point looks like a new place."""
    mirrored.sync()
    (tmp_path / "second").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(RunDirError, match="the second place is away, or was emptied: iteration 30"):
            sync.mirror_checkpoints(mirrored.run)
        (tmp_path / "second").mkdir(exist_ok=True)
    (tmp_path / "second").rmdir()
    (tmp_path / "away").rename(tmp_path / "second")
    assert mirrored.sync() == []


def test_two_do_not_copy_at_once(mirrored: Mirrored) -> None:
    with open(mirrored.run.mirror / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunDirError, match="another process copies"):
            sync.mirror_checkpoints(mirrored.run)


def test_a_run_without_a_second_place_says_so(mirrored: Mirrored) -> None:
    mirrored.run.mirror_policy.unlink()
    with pytest.raises(RunDirError, match="not copied to a second place") as error:
        sync.mirror_checkpoints(mirrored.run)
    assert "set checkpoint.mirror" in (error.value.hint or "")
