"""The line of `relayrun status` about the copies in a second place."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from relayrun.control.notify import events
from relayrun.control.notify.notices import NoticeTarget
from relayrun.control.rundir.plan import Plan
from relayrun.errors import RunDirError
from relayrun.train.mirror import sync
from relayrun.watch.status import run_status, run_status_text
from relayrun.watch.status.queue import QueueStatus
from tests.control.test_notify import policy
from tests.mirrored import Mirrored
from tests.train.test_mirror import Cut, make_run, mirrored  # noqa: F401 - the last two are fixtures


def test_status_says_how_it_stands(mirrored: Mirrored) -> None:  # noqa: F811
    mirrored.run.mirror_policy.rename(mirrored.run.path / "aside")
    assert run_status.read_run_status(mirrored.run, QueueStatus(), now=time.time()).mirror is None
    (mirrored.run.path / "aside").rename(mirrored.run.mirror_policy)
    mirrored.sync()
    found = run_status.read_run_status(mirrored.run, QueueStatus(), now=time.time())
    lines = dict(run_status_text._lines(found, time.time()))
    assert lines["mirror"].startswith("iteration 30 is copied and verified (looked ")
    mirrored.save(40)
    found = run_status.read_run_status(mirrored.run, QueueStatus(), now=time.time())
    words = "iteration 30 is copied and verified; iteration 40 is not copied yet (looked "
    assert dict(run_status_text._lines(found, time.time()))["mirror"].startswith(words)


def mirror_line(mirrored: Mirrored, *, now: float | None = None) -> str:  # noqa: F811
    moment = time.time() if now is None else now
    return dict(run_status_text._lines(run_status.read_run_status(mirrored.run, QueueStatus(), now=moment), moment))[
        "mirror"
    ]


def test_status_says_for_how_long_copies_fail_and_why(mirrored: Mirrored) -> None:  # noqa: F811
    mirrored.sync()
    mirrored.save(40)
    (mirrored.place / ".staging").rmdir()
    (mirrored.place / ".staging").write_bytes(b"in the way")
    for _ in range(2):
        done = sync.mirror_checkpoints(mirrored.run)
        assert done.complaints
    words = mirror_line(mirrored, now=time.time() + 3 * 86400)
    assert words.startswith("iteration 30 is copied and verified; iteration 40 is not copied yet: ")
    assert ".staging: " in words
    assert words.endswith(" ago; all was well 3.0 days ago)"), words
    (mirrored.place / ".staging").unlink()
    mirrored.sync()
    assert "all was well" not in mirror_line(mirrored)


def test_status_of_copies_that_never_worked(mirrored: Mirrored) -> None:  # noqa: F811
    """The program that copies may not even start: then nobody writes how its pass ended."""
    assert mirror_line(mirrored).startswith("no copy yet; iteration 30 is not copied yet: no pass has ended")
    assert f"{mirrored.run.mirror}/log" in mirror_line(mirrored)
    shutil.rmtree(mirrored.place.parents[1])
    with pytest.raises(RunDirError):
        sync.mirror_checkpoints(mirrored.run)
    assert mirror_line(mirrored).endswith(" ago; never was all well)")


def test_a_copier_that_does_not_start_is_told_with_the_cause(mirrored: Mirrored) -> None:  # noqa: F811
    words = "ModuleNotFoundError: No module named 's3fs'"
    mirrored.run.mirror.mkdir(exist_ok=True)
    log = mirrored.run.mirror / "log"
    log.write_text(f'Traceback (most recent call last):\n  File "sync.py", line 3, in <module>\n{words}\n')
    assert f"no pass has ended since the submit; {words} (sync.py:3) (looked " in mirror_line(mirrored)
    now, plan = time.time() + 2 * 3600, Plan.load(mirrored.run)
    told = policy(NoticeTarget(name="t", url="jsons://example.invalid", events=["disk"]))
    (notice,) = events._mirror_notices(mirrored.run, plan, told, now)
    assert notice.event == "disk"
    assert notice.reason == f"checkpoints are not copied to the mirror: {words} (sync.py:3)"
    assert not [*events._mirror_notices(mirrored.run, plan, told, time.time())]
    mirrored.sync()
    assert not [*events._mirror_notices(mirrored.run, plan, told, now)]


def test_status_calls_no_copy_whole_that_was_cut_or_cannot_be_seen(mirrored: Mirrored) -> None:  # noqa: F811
    mirrored.sync()
    os.truncate(mirrored.place / "iter_0000030/part/data", 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync._MirrorPass, "_look_at_copies", raise_cut)
        with pytest.raises(Cut):
            sync.mirror_checkpoints(mirrored.run)
    assert mirror_line(mirrored).startswith("iteration 20 is copied and verified; iteration 30 is not copied yet")
    mirrored.place.rename(mirrored.place.with_name("away"))
    with pytest.raises(RunDirError, match="is away"):
        sync.mirror_checkpoints(mirrored.run)
    assert mirror_line(mirrored).startswith("iteration 20 was copied and verified; iteration 30 is not copied yet: ")
    assert "the second place is away, or was emptied: iteration 20 was copied there" in mirror_line(mirrored)


def raise_cut(*_: object, **__: object) -> None:
    raise Cut


def test_status_counts_no_copy_of_what_was_computed_again(mirrored: Mirrored) -> None:  # noqa: F811
    mirrored.sync()
    mirrored.compute_again((20,), b"another")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync._MirrorPass, "_copy", raise_cut)
        with pytest.raises(Cut):
            sync.mirror_checkpoints(mirrored.run)
    words = mirror_line(mirrored)
    assert "iteration 20 is not copied yet" in words, words


def test_a_job_tells_of_copies_that_wait_without_a_word_as_the_sentinel_does(mirrored: Mirrored) -> None:  # noqa: F811
    mirrored.sync()
    mirrored.save(40)
    told = policy(NoticeTarget(name="t", url="jsons://example.invalid", events=["disk"]))
    hours = [events.NOT_COPIED_SECONDS / 2, events.NOT_COPIED_SECONDS * 2]
    plan = Plan.load(mirrored.run)
    early, late = ([*events._mirror_notices(mirrored.run, plan, told, time.time() + each)] for each in hours)
    assert early == []
    assert [each.reason for each in late] == [
        "1 checkpoints wait for their copy in the mirror; the newest copy is of 30"
    ]
