"""Commands that are killed, interrupted, started twice, and whose inputs, outputs and disks change meanwhile.

A command has arguments, other arguments and an output. Each case stops it at one of its file operations, lets
something happen there, and looks at what it leaves; then the same command again must give the expected bytes.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import InputError
from relayrun.publishing import published_file
from tests.publish.commands import COMMANDS, Command, Place, faulty_disk, serve

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


def each_command(
    which: Callable[[Command], object] = lambda command: not command.fills, *, only: str = ""
) -> pytest.MarkDecorator:
    """Parametrize a test by the names of the commands.

    `which`: chooses the commands; default: all that don't fill a folder. `only`: the one that `make test` runs, too;
    empty: all of those whose server does not import torch, which takes long.
    """

    def marks(name: str) -> list[pytest.MarkDecorator]:
        quick = name == only if only else COMMANDS[name].inputs == "text"
        return [] if quick else [pytest.mark.long]

    names = (name for name, command in COMMANDS.items() if which(command))
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


def every(_: Command) -> bool:
    return True


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {"stack": stack}


@pytest.fixture
def place(request: pytest.FixtureRequest, places: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder and server of the command that the test is about."""
    kind = COMMANDS[request.node.callspec.params["name"]].inputs
    if kind not in places:
        places[kind] = places["stack"].enter_context(serve(tmp_path_factory.mktemp(kind), kind))
    found: Place = places[kind]
    return found


def again(place: Place, name: str) -> None:
    """The same command gives the expected files, and removes what is left of the others."""
    code, words = place.run(COMMANDS[name].arguments)
    assert code == 0, words
    assert "Traceback" not in words
    assert place.tree() == place.expected(name)


def interrupt(place: Place, name: str, number: signal.Signals, at: int) -> None:
    """Send a signal at a file operation."""
    expected = place.expected(name)
    if (started := place.stopped(name, stop_at=at)) is None:
        return
    before = place.tree()
    os.kill(started[0], number)
    time.sleep(0.01)
    place.go(started)
    code, words = place.end(started)
    assert "Traceback" not in words, words
    assert "has changed nothing" not in words or place.tree() == place.beginning
    made = COMMANDS[name].made
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code in (128 + number, 0), words
        assert code == 0 or re.match(r"interrupted( by SIG\w+)?: \S", words.splitlines()[-1]), words
        assert not place.left(name)
    now = {key: value for key, value in place.tree().items() if key == made or key.startswith(f"{made}/")}
    if now:  # whole: of this command, or what was there before
        if COMMANDS[name].fills:
            now = {key: value for key, value in now.items() if ".tmp-" not in key}
        wanted = {key: expected.get(key) for key in now}
        assert {key: now[key] for key in wanted} == wanted or now.items() <= before.items()
    elif COMMANDS[name].over:
        assert number == signal.SIGKILL  # between two renames, if the file system cannot exchange them
    if place.tree() or not COMMANDS[name].inside:
        again(place, name)


def moments(place: Place, name: str, count: int) -> list[int]:
    """Return numbers of file operations: the last ones, which publish, and others at random."""
    last = len(place.operations(name))
    ending = range(max(1, last - count // 2), last + 1)
    others = range(1, ending[0])
    return sorted({*ending, *random.Random(name).sample(others, min(len(others), count - count // 2))})


@each_command(every)
def test_a_killed_or_interrupted_command_leaves_nothing_half_and_goes_on(place: Place, name: str) -> None:
    draw = random.Random(name)
    for at in moments(place, name, 2):
        interrupt(place, name, draw.choice(SIGNALS), at)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@each_command(every)
def test_every_signal_at_twenty_moments(place: Place, name: str, number: signal.Signals) -> None:
    for at in moments(place, name, 20):
        interrupt(place, name, number, at)


@pytest.mark.parametrize(
    "others", [False, pytest.param(True, marks=pytest.mark.long)], ids=["the same", "other arguments"]
)
@each_command()
def test_of_two_at_once_one_is_whole_and_the_other_names_it(place: Place, name: str, others: bool) -> None:
    expected, command = place.expected(name), COMMANDS[name]
    started = place.stopped_in_work(name)
    code, words = place.run(command.others if others else command.arguments)
    place.go(started)
    first, said = place.end(started)
    assert first == 0, said
    assert code == 1, words
    assert "another process" in words or "prepared or tokenized by another process" in words
    assert place.tree() == expected


@each_command(lambda command: not command.fills and not command.owned)
def test_what_comes_to_stand_at_the_output_meanwhile_stays(place: Place, name: str) -> None:
    place.expected(name)
    command = COMMANDS[name]
    started = place.stopped_in_work(name)
    target = place.out / (command.appears or command.made)
    if command.over:
        (target / "thesis.txt").write_text("two weeks of work")
    elif target.suffix:
        target.write_text("two weeks of work")
    else:
        target.mkdir(parents=True)
        (target / "thesis.txt").write_text("two weeks of work")
    place.go(started)
    code, words = place.end(started)
    assert code == 1, words
    assert "Traceback" not in words
    assert str(target) in words
    assert ".tmp-" not in words
    assert (target if target.is_file() else target / "thesis.txt").read_text() == "two weeks of work"
    assert not [path for path in place.tree() if ".tmp-" in path]


@pytest.mark.parametrize(
    "how", ["replaced", *(pytest.param(how, marks=pytest.mark.long) for how in ("changed", "removed"))]
)
@each_command(lambda command: command.reads)
def test_an_input_that_changes_while_it_is_read_is_named(place: Place, name: str, how: str) -> None:
    place.expected(name)
    command = COMMANDS[name]
    started = place.stopped_in_work(name)
    path = place.inputs / command.reads
    if how == "changed":
        os.utime(path, (1, 1))
    elif how == "removed":
        path.unlink()
    else:
        (shutil.copy if command.by_time else shutil.copy2)(path, place.inputs / "copy")
        os.replace(place.inputs / "copy", path)
    place.go(started)
    code, words = place.end(started)
    assert code == 1, words
    assert command.reads in words
    assert "Traceback" not in words
    assert command.over or command.made not in place.tree()
    assert not [path for path in place.tree() if ".tmp-" in path]


@each_command(lambda command: command.opens)
def test_an_input_that_changes_once_it_is_read_is_named(place: Place, name: str) -> None:
    """Its first bytes would be of another file than those that are read later."""
    place.expected(name)
    path = place.inputs / COMMANDS[name].opens
    started = place.stopped(name, stop_behind=str(path))
    assert started is not None
    os.utime(path, (1, 1))
    place.go(started)
    code, words = place.end(started)
    assert code == 1, words
    assert f"{path}: this file changed while it was read" in words
    assert COMMANDS[name].made not in place.tree()


@each_command(lambda command: command.inside and not command.fills)
def test_a_full_disk_is_one_line_about_the_output(place: Place, name: str) -> None:
    """By a limit of a file's size."""
    place.fresh(COMMANDS[name])
    before = place.tree()
    code, words = place.run(COMMANDS[name].arguments, limit=5)
    failed(place, name, code, words)
    assert not {path for path in place.tree().keys() - before.keys() if not re.fullmatch(COMMANDS[name].keeps, path)}
    place.fresh(COMMANDS[name])
    again(place, name)


@pytest.mark.long
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@each_command()
def test_a_disk_that_fails_from_some_change_on_is_one_line_about_the_output(
    place: Place, name: str, fault: int
) -> None:
    if place.no_faults:
        pytest.skip(place.no_faults)
    place.expected(name)
    code = 1
    for after in (0, 1, 2, 3, 5, 8, 13, 21):
        place.fresh(COMMANDS[name])
        code, words = place.run(COMMANDS[name].arguments, fails=(fault, after))
        if code == 0:
            break
        failed(place, name, code, words)
        assert fault == errno.EROFS or not place.left(name)
        again(place, name)
    assert after, "the fault did not reach the command"


def failed(place: Place, name: str, code: int, words: str) -> None:
    """The command says in one line what is wrong with its output."""
    assert code == 1, words
    assert "Traceback" not in words
    assert str(place.out) in words
    assert ".tmp-" not in words


def test_without_a_compiler_it_is_said_why_no_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert faulty_disk(tmp_path) == ({}, "disks that fail: this machine has no C compiler")
    (tmp_path / "cc").write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    environment, reason = faulty_disk(tmp_path)
    assert environment == {}
    assert reason.endswith("cc cannot compile faults.c: no headers\n")


@each_command(every)
def test_a_finished_command_is_done(place: Place, name: str) -> None:
    expected = place.expected(name)
    place.fresh(COMMANDS[name])
    for _ in range(2):
        code, words = place.run(COMMANDS[name].arguments)
        assert code == 0, words
        assert place.tree() == expected


@each_command(only="shuffle")
def test_a_command_shows_its_progress_on_a_terminal_alone(place: Place, name: str) -> None:
    place.fresh(COMMANDS[name])
    code, words = place.run(COMMANDS[name].arguments, terminal=True)
    assert code == 0, words
    assert (" per second" in words) == COMMANDS[name].terminal
    assert place.tree() == place.expected(name)


@each_command(only="merge")
def test_an_output_folder_that_vanishes_is_named(place: Place, name: str) -> None:
    place.expected(name)
    started = place.stopped_in_work(name)
    shutil.rmtree(place.out)
    place.go(started)
    code, words = place.end(started)
    assert code == 1, words
    assert "Traceback" not in words
    assert str(place.out) in words
    assert ".tmp-" not in words
    place.fresh(COMMANDS[name])
    again(place, name)


@pytest.mark.parametrize("leads_to", ["nothing", "an empty folder", "a thesis"])
@each_command(lambda command: not command.fills and not command.owned and not command.over)
def test_a_link_at_the_output_stays_and_nothing_behind_it_is_lost(place: Place, name: str, leads_to: str) -> None:
    """It is refused, or followed to its end."""
    expected, output = place.expected(name), COMMANDS[name].appears or COMMANDS[name].made
    place.fresh(COMMANDS[name])
    top = output.partition("/")[0]
    aim = place.out / "aim" / top
    aim.parent.mkdir()
    if leads_to != "nothing":
        aim.mkdir()
    if leads_to == "a thesis":
        (aim / "thesis.txt").write_text("two weeks of work")
    (place.out / top).symlink_to(aim)
    before = place.tree()
    code, words = place.run(COMMANDS[name].arguments)
    assert "Traceback" not in words
    now = place.tree()
    assert now.items() >= before.items(), words
    if code:
        assert str(place.out / top) in words
        assert now.keys() - before.keys() <= {f"aim/{top}/.lock"}
    else:
        wanted = {path: value for path, value in expected.items() if path.partition("/")[0] == top}
        assert now.items() >= {f"aim/{path}": value for path, value in wanted.items()}.items()


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_file_takes_the_place_of_a_file_alone(tmp_path: Path, what: str) -> None:
    final = tmp_path / "page.html"
    if what == "folder":
        final.mkdir()
        (final / "thesis.txt").write_text("two weeks of work")
    else:
        os.mkfifo(final)
    before = final.stat()
    with pytest.raises(InputError, match="this is no file"), published_file(final) as made:
        made.write_text("words")
    assert final.stat() == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
