"""Copies of checkpoints below a URL: what is claimed is there, whatever is cut, full, slow, away or wrong."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir import mirror as records
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.errors import ConfigError, InputError, RunDirError
from relayrun.files import file_sizes
from relayrun.tokens.stores import urls
from relayrun.train.mirror import destination, object_store, restore, sync
from relayrun.train.mirror.destination import CopyRateLimit
from relayrun.train.mirror.sync import destination_at
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.mirrored import SIZE, Mirrored, digest, flip
from tests.object_store import ObjectStore
from tests.waiting import wait_for

URL = "objects://mine/ada/my-project/my-run"
ROOT = URL.partition("://")[2]


class MirroredBelowUrl(Mirrored):
    """A run whose copies lie in a store of objects."""

    def __init__(self, make: MakeRun, folder: Path) -> None:
        super().__init__(make, folder)
        self.out = folder / "out"
        self.policy()

    def policy(self, **changes: object) -> None:
        super().policy(**{"folder": URL} | changes)

    def claims(self) -> dict[str, records.CheckpointCopy]:
        return destination_at(URL, CopyRateLimit(None)).copies()

    def claimed(self, *, but: int | None = None) -> list[int]:
        """Iterations that are claimed to be there; each is, byte for byte, by the store's own objects.

        `but`: one that a test has damaged.
        """
        shutil.rmtree(self.out, ignore_errors=True)
        found = {name: copy for name, copy in self.claims().items() if copy.iteration != but}
        for copy in found.values():
            for path, data in ObjectStore.objects.items():
                if path.startswith(f"{ROOT}/{copy.name}"):
                    file = self.out / path.removeprefix(f"{ROOT}/")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(data)
            assert digest(self.out / copy.name) == self.known[copy.iteration]
        return sorted(copy.iteration for copy in found.values())

    def there(self) -> list[str]:
        """What stands in the store, without the files of copies."""
        names = (path.removeprefix(f"{ROOT}/") for path in ObjectStore.objects)
        return sorted({name.partition("/")[0] if name.startswith("iter_") else name for name in names})


@pytest.fixture
def mirrored(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MirroredBelowUrl:  # noqa: F811
    monkeypatch.setattr(destination, "COPY_PIECE_BYTES", 700)
    monkeypatch.setattr(urls, "RETRY_PAUSES", (0.0, 0.0))
    ObjectStore.begin()
    made = MirroredBelowUrl(make_run, tmp_path)
    for iteration in (10, 20, 30):
        made.save(iteration)
    made.remember()
    return made


# what is copied, and what stays


def test_the_newest_are_copied_and_verified_first(mirrored: MirroredBelowUrl) -> None:
    assert mirrored.sync() == ["copied iteration 30", "copied iteration 20"]
    assert mirrored.claimed() == [20, 30]
    assert mirrored.sync() == []
    mirrored.save(40)
    mirrored.remember()
    assert mirrored.sync() == ["copied iteration 40", "removed iteration 20"]
    assert mirrored.claimed() == [30, 40]
    claims = ["copies/iter_0000030.json", "copies/iter_0000040.json"]
    assert mirrored.there() == [*claims, "iter_0000030", "iter_0000040", "mirror.json"]
    last = records.read_last_pass(mirrored.run)
    assert last is not None
    assert (last.iteration, last.behind, last.complaint) == (40, 0, None)


def test_multiples_stay_by_a_rule_of_its_own(mirrored: MirroredBelowUrl) -> None:
    mirrored.policy(keep_last=1, keep_every=20)
    mirrored.sync()
    assert mirrored.claimed() == [20, 30]
    mirrored.save(50)
    mirrored.remember()
    mirrored.sync()
    assert mirrored.claimed() == [20, 50]


@pytest.mark.parametrize("file", [False, True], ids=["a folder", "a file"])
def test_a_checkpoint_without_hashes_is_compared_with_its_copy(mirrored: MirroredBelowUrl, file: bool) -> None:
    mirrored.save_without_hashes(40, file=file)
    mirrored.remember()
    assert mirrored.sync() == ["copied iteration 40", "copied iteration 30"]
    assert mirrored.claimed() == [30, 40]
    target = f"{ROOT}/iter_0000040" + ("" if file else "/common.pt")
    ObjectStore.objects[target] = b"?" + ObjectStore.objects[target][1:]
    done = sync.mirror_checkpoints(mirrored.run, verify=True)
    assert "the copy of iteration 40 is damaged" in done.complaints[0]
    assert mirrored.claimed() == [30, 40]


def test_what_was_computed_again_is_copied_again(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    mirrored.compute_again((20, 30), b"anew")
    mirrored.remember()
    mirrored.sync()
    assert mirrored.claimed() == [20, 30]


# cut


class Cut(BaseException):
    """A kill, as far as a process can do it to itself."""


@contextmanager
def cut_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Cut before the operation of this number."""
    calls: list[str] = []

    def counted(operation: str, path: str) -> None:
        calls.append(operation)
        if len(calls) == number:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "before", staticmethod(counted))
        patch.setattr(CopyRateLimit, "spend", lambda self, count: counted("spend", ""))
        yield calls
    gc.collect()  # a file that is half sent must not be finished when it is collected


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), pytest.param(9, marks=pytest.mark.slow)])
def test_a_pass_that_is_cut_anywhere_claims_nothing_that_is_not_there(
    mirrored: MirroredBelowUrl, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    mirrored.sync()
    saved = mirrored.save(40)
    mirrored.remember()
    damaged = f"{ROOT}/iter_0000020/common.pt"
    ObjectStore.objects[damaged] = b"x" + ObjectStore.objects[damaged][1:]  # so that a claim is taken back as well
    before = dict(ObjectStore.objects)
    with cut_at(0, monkeypatch) as calls:
        sync.mirror_checkpoints(mirrored.run, verify=True)
    assert set(calls) == {"read", "list", "write", "copy", "remove", "spend"}
    for number in range(1, len(calls) + 1, every):
        ObjectStore.objects.clear()
        ObjectStore.objects.update(before)
        with cut_at(number, monkeypatch), pytest.raises(Cut):
            sync.mirror_checkpoints(mirrored.run, verify=True)
        whole = set(mirrored.claimed(but=20))
        assert 30 in whole  # the last verified one, whatever happens
        sent = {path.rpartition("40/")[2]: len(data) for path, data in ObjectStore.objects.items() if "40/" in path}
        assert sent.items() <= saved.files.items()  # a file that is half sent is no object
        sync.mirror_checkpoints(mirrored.run, verify=True)
        assert mirrored.claimed() == [30, 40]
        assert not [name for name in mirrored.there() if name.startswith(("copying", "iter_0000020"))]


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_with_the_file_that_it_was_at(
    mirrored: MirroredBelowUrl, tmp_path: Path
) -> None:
    """On files of this machine, which a kill leaves half written."""
    (tmp_path / "files").mkdir()
    url = f"file://{tmp_path}/files/my-project/my-run"
    mirrored.policy(folder=url, megabytes_per_second=3e-4)
    first, second = (tmp_path / f"files/my-project/my-run/iter_0000030/{name}" for name in ("common.pt", "part/data"))
    program = "import sys; from relayrun.train.mirror import destination; destination.COPY_PIECE_BYTES = 100; " + (
        "from relayrun.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, "checkpoint", "mirror", str(mirrored.run.path)])
    wait_for(lambda: first.exists() and second.exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path.name for path in (first, second) if path.exists() and path.stat().st_size == SIZE}
    assert len(done) == 1
    assert destination_at(url, CopyRateLimit(None)).copies() == {}
    mirrored.policy(folder=url)
    sent: list[str] = []
    real = object_store.ObjectStoreDestination._send

    def counted(self: object, source: object, name: str, file: str, *rest: object) -> None:
        sent.append(f"{name}/{file}")
        real(self, source, name, file, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store.ObjectStoreDestination, "_send", counted)
        assert mirrored.sync() == ["copied iteration 30", "copied iteration 20"]
    assert not [name for name in sent if name.startswith("iter_0000030") and Path(name).name in done]
    for iteration in (20, 30):
        assert digest(tmp_path / f"files/my-project/my-run/iter_00000{iteration}") == mirrored.known[iteration]


# full


def test_a_full_store_claims_nothing_and_goes_on_when_there_is_room(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    mirrored.save(40)
    mirrored.remember()
    ObjectStore.room = sum(map(len, ObjectStore.objects.values())) + SIZE + 1000
    (complaint,) = sync.mirror_checkpoints(mirrored.run).complaints
    assert complaint.startswith(f"{URL}/iter_0000040: the store refuses this: Disk quota exceeded")
    assert mirrored.claimed() == [20, 30]
    last = records.read_last_pass(mirrored.run)
    assert last is not None
    assert (last.iteration, last.behind) == (30, 1)
    ObjectStore.room = float("inf")
    assert mirrored.sync()[0] == "copied iteration 40"
    assert mirrored.claimed() == [30, 40]


# slow


def test_no_more_than_so_many_bytes_a_second_there_and_back(mirrored: MirroredBelowUrl) -> None:
    slept = [0.0]
    pace = CopyRateLimit(1000.0, sleep=lambda seconds: slept.append(slept[-1] + seconds), clock=lambda: slept[-1])
    mirrored.sync(pace=pace)
    size = sum(sum(file_sizes(mirrored.run.checkpoint(each)).values()) for each in (20, 30))
    assert 2 * size <= 1000.0 * slept[-1] <= 2.3 * size  # the list of hashes is read twice


def test_a_slow_copy_keeps_its_checkpoint_from_the_rules_of_the_run(mirrored: MirroredBelowUrl) -> None:
    saved: list[int] = []

    class Slow(CopyRateLimit):
        def spend(self, count: int) -> None:
            if len(saved) < 5:
                saved.append(40 + 10 * len(saved))
                mirrored.save(saved[-1], keep_last=1)
                assert mirrored.run.checkpoint(30).is_dir()

    whole = mirrored.known
    mirrored.sync(pace=Slow(None))
    mirrored.remember()
    mirrored.known |= whole
    assert mirrored.claimed()[-1] == 80


# away


def test_failures_that_pass_cost_a_pause_and_no_copy(mirrored: MirroredBelowUrl) -> None:
    failed: set[tuple[str, str]] = set()

    def flaky(operation: str, path: str) -> None:
        if operation != "remove" and (operation, path) not in failed:
            failed.add((operation, path))
            raise OSError(errno.ECONNRESET, "Connection reset by peer")

    ObjectStore.before = staticmethod(flaky)
    assert mirrored.sync() == ["copied iteration 30", "copied iteration 20"]
    assert {operation for operation, _ in failed} >= {"read", "write", "list"}
    ObjectStore.before = staticmethod(lambda operation, path: None)
    assert mirrored.claimed() == [20, 30]


def test_a_store_that_does_not_answer_is_asked_once_and_said(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    asked: list[str] = []

    def away(operation: str, path: str) -> None:
        asked.append(path)
        raise ConnectionError("no route; AKIAABCDEFGHIJKLMNOP")

    ObjectStore.before = staticmethod(away)
    (complaint,) = sync.mirror_checkpoints(mirrored.run).complaints
    assert "the store does not answer: no route; <AWS key> (tried 3 times)" in complaint
    assert len(asked) == 3  # and no pause of minutes for each of the others
    last = records.read_last_pass(mirrored.run)
    assert last is not None
    assert last.iteration == 30
    assert "AKIA" not in (last.complaint or "")


def test_access_that_is_lost_is_no_damage(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()

    def closed(operation: str, path: str) -> None:
        if operation == "list" and path.endswith("iter_0000030"):
            raise PermissionError("Access Denied")

    ObjectStore.before = staticmethod(closed)
    (complaint,) = sync.mirror_checkpoints(mirrored.run, verify=True).complaints
    assert "the store refuses this: Access Denied" in complaint
    ObjectStore.before = staticmethod(lambda operation, path: None)
    assert mirrored.claimed() == [20, 30]


def test_a_store_that_was_emptied_is_not_begun_anew(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    ObjectStore.objects.clear()
    with pytest.raises(RunDirError, match="the second place is away, or was emptied: iteration 30"):
        sync.mirror_checkpoints(mirrored.run)
    assert ObjectStore.objects == {}


# corrupted


@pytest.mark.parametrize("wrong", [lambda data: b"x" + data[1:], lambda data: data[:-1]], ids=["flipped", "cut short"])
def test_a_copy_that_is_wrong_on_its_way_is_copied_again(mirrored: MirroredBelowUrl, wrong: object) -> None:
    spoilt: list[str] = []

    def once(path: str, data: bytes) -> bytes:
        if path.endswith("common.pt") and not spoilt:
            spoilt.append(path)
            return wrong(data)  # type: ignore[no-any-return, operator]
        return data

    ObjectStore.taken = staticmethod(once)
    assert mirrored.sync() == ["copied iteration 30", "copied iteration 20"]
    assert len(spoilt) == 1
    assert mirrored.claimed() == [20, 30]


def test_a_store_that_is_always_wrong_has_no_copies(mirrored: MirroredBelowUrl) -> None:
    ObjectStore.taken = staticmethod(lambda path, data: data[:-1] + b"x" if path.endswith("common.pt") else data)
    done = sync.mirror_checkpoints(mirrored.run)
    assert len(done.complaints) == 2
    assert "is not what was saved, 2 times: common.pt is not the one that was saved" in done.complaints[0]
    assert mirrored.claims() == {}


def test_a_copy_that_goes_bad_is_taken_back_set_aside_and_made_anew(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    ObjectStore.objects[f"{ROOT}/iter_0000020/common.pt"] = b"short"  # its size tells
    bytes_of_30 = f"{ROOT}/iter_0000030/common.pt"
    ObjectStore.objects[bytes_of_30] = b"x" + ObjectStore.objects[bytes_of_30][1:]  # its bytes alone do
    done = sync.mirror_checkpoints(mirrored.run, verify=True)
    assert [each.split(":")[0] for each in done.complaints] == [
        "the copy of iteration 20 is damaged",
        "the copy of iteration 30 is damaged",
    ]
    assert mirrored.claimed() == [20, 30]
    assert ObjectStore.objects[f"{ROOT}/damaged/iter_0000020/common.pt"] == b"short"
    assert f"{ROOT}/damaged/iter_0000030/part/data" in ObjectStore.objects


def test_a_damaged_checkpoint_is_not_copied_and_takes_no_good_copy_away(mirrored: MirroredBelowUrl) -> None:
    mirrored.policy(keep_last=1)
    mirrored.sync()
    mirrored.save(40)
    flip(mirrored.run.checkpoint(40) / "common.pt")
    (complaint,) = sync.mirror_checkpoints(mirrored.run).complaints
    assert f"{mirrored.run.checkpoint(40)}: it is damaged: common.pt is not the one that was saved" in complaint
    assert mirrored.claimed() == [30]


def test_a_claim_that_cannot_be_read_is_said_and_nothing_is_removed(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    ObjectStore.objects[f"{ROOT}/copies/iter_0000020.json"] = b'{"name": "iter'
    before = dict(ObjectStore.objects)
    with pytest.raises(RunDirError, match=r"copies/iter_0000020.json: unreadable record"):
        sync.mirror_checkpoints(mirrored.run)
    assert {name: data for name, data in ObjectStore.objects.items() if not name.endswith("mirror.json")} == {
        name: data for name, data in before.items() if not name.endswith("mirror.json")
    }


# back


def test_a_run_that_lost_its_checkpoints_gets_them_back(
    mirrored: MirroredBelowUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrored.sync()
    known = mirrored.known
    mirrored.lose()
    with pytest.raises(RunDirError, match="no checkpoint of this run is whole"):
        resume_point(mirrored.run)
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 0
    assert "restored iteration 30: " in capsys.readouterr().out
    assert digest(mirrored.run.checkpoint(30)) == known[30]
    assert resume_point(mirrored.run).iteration == 30
    assert main(["checkpoint", "restore", f"{mirrored.run.path}:20"]) == 0
    assert digest(mirrored.run.checkpoint(20)) == known[20]


def test_a_damaged_copy_is_not_put_back_and_the_one_before_is(
    mirrored: MirroredBelowUrl, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrored.sync()
    spoilt = f"{ROOT}/iter_0000030/common.pt"
    ObjectStore.objects[spoilt] = b"x" + ObjectStore.objects[spoilt][1:]
    mirrored.lose()
    assert main(["checkpoint", "restore", f"{mirrored.run.path}:30"]) == 1
    assert "the copy of iteration 30 is damaged: common.pt is not the one" in capsys.readouterr().err
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 0
    said = capsys.readouterr().out
    assert "not restored: " in said
    assert "restored iteration 20: " in said
    assert resume_point(mirrored.run).iteration == 20


@pytest.mark.parametrize("below_url", [True, False])
def test_a_copy_of_a_run_that_is_lost_comes_into_any_folder(
    mirrored: MirroredBelowUrl, tmp_path: Path, capsys: pytest.CaptureFixture[str], below_url: bool
) -> None:
    where = URL if below_url else str(mirrored.place)
    mirrored.policy(folder=where)
    mirrored.sync()
    shutil.rmtree(mirrored.run.path)
    target = tmp_path / "back"
    assert main(["checkpoint", "restore", where, "--to", str(target)]) == 0
    assert f"verified: {target}/iter_0000030" in capsys.readouterr().out
    assert digest(target / "iter_0000030") == mirrored.known[30]
    assert main(["checkpoint", "restore", f"{where}:20", "--to", str(target)]) == 0
    assert digest(target / "iter_0000020") == mirrored.known[20]
    assert sorted(os.listdir(target)) == ["iter_0000020", "iter_0000030"]
    assert restore.fetch_copy(where, 20, target) == [f"iteration 20 is there already, verified: {target}/iter_0000020"]
    block = next(path for path in sorted((target / "iter_0000020").rglob("*")) if path.is_file())
    block.write_bytes(block.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="something has this name already"):
        restore.fetch_copy(where, 20, target)
    with pytest.raises(InputError, match="there is no copy of iteration 10") as error:
        restore.fetch_copy(where, 10, target)
    assert error.value.hint == "copies: 20, 30"
    if not below_url:  # named a level too high
        with pytest.raises(InputError, match="there is no copy") as error:
            restore.fetch_copy(str(mirrored.place.parent), None, target)
        assert error.value.hint == f"copies: none; did you mean {mirrored.place}?"


# the place


def test_the_place_of_another_run_is_refused(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    mirrored.policy(id="4567")
    with pytest.raises(RunDirError, match="holds the copies of another run"):
        sync.mirror_checkpoints(mirrored.run)


def test_a_bucket_or_folder_that_is_not_there_is_said_and_not_made(mirrored: MirroredBelowUrl, tmp_path: Path) -> None:
    for above in (f"file://{tmp_path}/nowhere", "objects://other/ada"):
        mirrored.policy(folder=f"{above}/my-project/my-run")
        with pytest.raises(RunDirError, match="there is no such bucket or folder"):
            sync.mirror_checkpoints(mirrored.run)
        with pytest.raises(ConfigError, match=r"checkpoint.mirror.path: .*: there is no such bucket or folder"):
            object_store.try_object_store_access(above, "checkpoint.mirror.path")
    assert not (tmp_path / "nowhere").exists()


def test_a_place_is_tried_before_anything_is_queued(mirrored: MirroredBelowUrl) -> None:
    object_store.try_object_store_access("objects://mine/ada", "it")
    assert ObjectStore.objects == {}
    ObjectStore.before = staticmethod(_refuse)
    with pytest.raises(ConfigError, match="it cannot be written: Access Denied"):
        object_store.try_object_store_access("objects://mine/ada", "it")
    with pytest.raises(ConfigError, match="Protocol not known: nowhere"):
        object_store.try_object_store_access("nowhere://mine/ada", "it")


def test_a_name_that_is_a_pattern_is_refused_and_removes_nothing_of_others(mirrored: MirroredBelowUrl) -> None:
    """fsspec removes what a pattern matches: copies below `web2` for those below `web[2024]`."""
    ObjectStore.objects["mine/web2/run/iter_0000010/data"] = b"another's"
    named = destination_at("objects://mine/web[2024]/run", CopyRateLimit(None))
    with pytest.raises(InputError, match="in a name for a pattern, and would remove other copies"):
        named.remove("iter_0000010")
    with pytest.raises(ConfigError, match="in a name for a pattern, and would remove other copies"):
        object_store.try_object_store_access("objects://mine/web[2024]", "it")
    assert ObjectStore.objects == {"mine/web2/run/iter_0000010/data": b"another's"}


def _refuse(operation: str, path: str) -> None:
    if operation == "write":
        raise PermissionError("Access Denied")


def test_records_of_a_store_are_plain_json(mirrored: MirroredBelowUrl) -> None:
    mirrored.sync()
    owner = json.loads(ObjectStore.objects[f"{ROOT}/mirror.json"])
    assert owner == {"id": "0123", "run": str(mirrored.run.path)}
    claim = json.loads(ObjectStore.objects[f"{ROOT}/copies/iter_0000030.json"])
    assert (claim["iteration"], claim["gone"]) == (30, None)
