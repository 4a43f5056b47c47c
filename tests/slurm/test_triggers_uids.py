"""Triggers and three real users: the owner, a member of the group, and another.

The users need no accounts: the kernel knows numbers only, and root may take any. No Slurm is needed.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, RunDirError


class Person(NamedTuple):
    uid: int
    gid: int
    groups: tuple[int, ...]


TEAM, ELSEWHERE = 61_010, 61_011
OWNER = Person(61_001, 61_001, (TEAM, ELSEWHERE))
MEMBER = Person(61_002, 61_002, (TEAM,))
OTHER = Person(61_003, 61_003, ())


@contextmanager
def acting_as(person: Person) -> Iterator[None]:
    """This process with the person's effective ids, by which the kernel judges access to files."""
    groups = os.getgroups()
    os.setgroups(person.groups)
    os.setegid(person.gid)
    os.seteuid(person.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def touch_by_hand(person: Person, path: Path) -> int:
    """The plain command, as a process of that person; its exit status."""
    command = ["setpriv", f"--reuid={person.uid}", f"--regid={person.gid}"]
    command += [f"--groups={','.join(map(str, person.groups))}"] if person.groups else ["--clear-groups"]
    return subprocess.run([*command, "touch", str(path)], capture_output=True, check=False, timeout=600).returncode


@pytest.fixture
def run() -> Iterator[Run]:
    """A run directory of OWNER and the group TEAM, behind folders that everybody can pass."""
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("three users need root, and CI must not skip this")
        pytest.skip("three users need root")
    top = Path(tempfile.mkdtemp())
    try:
        top.chmod(0o711)
        made = Run(top / "run")
        made.path.mkdir()
        os.chown(made.path, OWNER.uid, TEAM)
        made.path.chmod(0o755)
        with acting_as(OWNER):
            triggers.create_trigger_folder(made)
        yield made
    finally:
        shutil.rmtree(top)


def has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("person", [OWNER, MEMBER], ids=["owner", "member"])
def test_owner_and_group_may_touch_and_the_answer_says_who(run: Run, person: Person) -> None:
    assert not has_account(person.uid)
    assert touch_by_hand(person, run.triggers / "save") == 0
    file = (run.triggers / "save").stat()
    assert (file.st_uid, file.st_gid) == (person.uid, TEAM)  # the folder hands its group on
    with acting_as(OWNER):  # whose job trains
        trigger = triggers.read_trigger(run, "save")
        assert trigger is not None
        assert trigger.user == str(person.uid)
        triggers.acknowledge_trigger(run, trigger, iteration=7, result="saved")
    assert sorted(path.name for path in run.triggers.iterdir()) == ["save.done"]
    done = json.loads((run.triggers / "save.done").read_text())
    assert (done["user"], done["iteration"], done["result"]) == (str(person.uid), 7, "saved")
    assert done["touched"] <= done["time"]


def test_others_may_not_and_are_told_who_may(run: Run) -> None:
    assert touch_by_hand(OTHER, run.triggers / "exit") != 0
    with acting_as(OTHER), pytest.raises(RunDirError) as refused:
        triggers.touch_trigger(run, "exit")
    assert f"only the user {OWNER.uid} and the group {TEAM} may" in refused.value.message
    assert list(run.triggers.iterdir()) == []


def test_what_two_members_ask_for_is_asked_once(run: Run) -> None:
    with acting_as(MEMBER):
        triggers.touch_trigger(run, "exit")
    with acting_as(OWNER):
        triggers.touch_trigger(run, "exit")  # not its file, but the wish is there
        trigger = triggers.read_trigger(run, "exit")
    assert trigger is not None
    assert trigger.user == str(MEMBER.uid)


def test_a_colleague_who_submits_finds_the_folder_as_it_should_be(run: Run) -> None:
    with acting_as(MEMBER):
        triggers.create_trigger_folder(run)  # may set nothing, and need not
    assert stat.S_IMODE(run.triggers.stat().st_mode) == 0o2770


def test_a_closed_folder_on_the_way_is_named(run: Run) -> None:
    assert triggers.first_closed_folder(run) is None
    run.path.chmod(0o700)  # as under umask 077
    assert triggers.first_closed_folder(run) == run.path
    assert touch_by_hand(MEMBER, run.triggers / "save") != 0
    run.path.chmod(0o710)
    assert triggers.first_closed_folder(run) is None
    assert touch_by_hand(MEMBER, run.triggers / "save") == 0


def test_the_group_is_a_setting(run: Run) -> None:
    with acting_as(OWNER):
        triggers.create_trigger_folder(run, str(ELSEWHERE))
    folder = run.triggers.stat()
    assert (folder.st_gid, stat.S_IMODE(folder.st_mode)) == (ELSEWHERE, 0o2770)
    assert touch_by_hand(MEMBER, run.triggers / "save") != 0
    with acting_as(OWNER), pytest.raises(ConfigError, match="cannot be given to the group 61999"):
        triggers.create_trigger_folder(run, "61999")
    with pytest.raises(ConfigError, match="there is no group 'no-such-group'"):
        triggers.create_trigger_folder(run, "no-such-group")
