"""Commands that are killed, interrupted, started twice, and whose inputs, outputs and disks change meanwhile.

A command has arguments, other arguments and an output. Each case stops it at one of its file operations, lets
something happen there, and looks at what it leaves; then the same command again must give the expected bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.tokenize.processes import ONE_THREAD_ENVIRONMENT
from tests.waiting import wait_for

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
MODULES = (
    "numpy",
    "pyarrow.parquet",
    "tokenizers",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "relayrun.cli",
    "relayrun.cli.data.dumps",
    "relayrun.cli.data.inspect_data",
    "relayrun.tokens.shuffle.reshard",
    "relayrun.tokens.tokenize.train_tokenizer",
    "relayrun.tokens.order.document_lengths",
)
RECORD_TIME = re.compile(rb'"(time|since)": [0-9.]+')


@dataclass(frozen=True)
class Command:
    """A command with `IN` and `OUT` in its arguments; `made` is its output below OUT."""

    arguments: str
    others: str
    made: str
    reads: str
    """An input, below IN."""
    appears: str = ""
    """The file or folder that another process puts at the output; empty: `made`."""
    over: bool = False
    """A result of the other arguments stands at the output before."""
    exclusive: bool = True
    """The second of two at once is refused."""


SHUFFLE = "dumps shuffle --dataset-folder IN/text --output-folder OUT/s --temp-dir OUT --file-size 0.002"
MIXTURE = "mixture create --folders IN/one IN/two --output OUT/mix --weights"
TOKENIZER = "dumps tokenizer --dataset-folder IN/text --output-folder OUT/t --vocabulary-size"
COMMANDS = {
    "merge": Command(
        "dumps merge --input IN/one IN/two --output-prefix OUT/m",
        "dumps merge --input IN/two IN/one --output-prefix OUT/m",
        "m.idx",
        "one/0.bin",
        appears="m.bin",
    ),
    "mixture": Command(f"{MIXTURE} 0.5 0.5", f"{MIXTURE} 0.3 0.7", "mix", "one/0.bin"),
    "mixture over one": Command(f"{MIXTURE} 0.5 0.5", f"{MIXTURE} 0.3 0.7", "mix", "one/0.bin", over=True),
    "shuffle": Command(SHUFFLE, f"{SHUFFLE} --seed 1", "s", "text/0.parquet"),
    "tokenizer": Command(f"{TOKENIZER} 300", f"{TOKENIZER} 320", "t", "text/0.parquet"),
    "prepare": Command(
        "dumps prepare --dataset-folder IN/text --preprocessing-metadata-folder OUT/meta --n-dumps 2",
        "dumps prepare --dataset-folder IN/text --preprocessing-metadata-folder OUT/meta --n-dumps 1",
        "meta/dumps",
        "",
    ),
    "lengths": Command(
        "data lengths IN/text --picture OUT/l.svg",
        "data lengths IN/text --picture OUT/l.svg --window 100",
        "l.svg",
        "",
    ),
}
WITH_INPUTS = [name for name, command in COMMANDS.items() if command.reads]


class Place:
    """Inputs and outputs of commands, and the server that runs them."""

    def __init__(self, folder: Path, server: subprocess.Popen[str]) -> None:
        self.folder, self.inputs, self.out, self._server = folder, folder / "in", folder / "out", server
        self._number = 0
        self._expected: dict[str, dict[str, str]] = {}
        self._operations: dict[str, list[str]] = {}

    def fresh(self, command: Command) -> None:
        """Empty the outputs and make the inputs anew."""
        for path in (self.out, self.inputs):
            shutil.rmtree(path, ignore_errors=True)
        self.out.mkdir(parents=True)
        shutil.copytree(self.folder / "original", self.inputs)
        if command.over:
            assert self.run(command.others)[0] == 0

    def _ask(self, request: dict[str, object]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return int(json.loads(self._server.stdout.readline()))

    def start(self, arguments: str, **more: object) -> tuple[int, Path]:
        """Start a command; return its process and the file of what it says."""
        self._number += 1
        said = self.folder / f"said-{self._number}"
        words = [word.replace("IN", str(self.inputs)).replace("OUT", str(self.out)) for word in arguments.split()]
        return self._ask({"argv": words, "output": str(said), "below": str(self.out)} | more), said

    def end(self, started: tuple[int, Path]) -> tuple[int, str]:
        """Wait for a command; return its exit code and what it says."""
        code = self._ask({"wait": started[0]})
        return code, started[1].read_text() if started[1].exists() else ""

    def run(self, arguments: str, **more: object) -> tuple[int, str]:
        return self.end(self.start(arguments, **more))

    def expected(self, name: str) -> dict[str, str]:
        """Return the files that an undisturbed command leaves; notes how many file operations it takes."""
        if name not in self._expected:
            self.fresh(COMMANDS[name])
            started = self.start(COMMANDS[name].arguments)
            code, words = self.end(started)
            assert code == 0, words
            self._operations[name] = json.loads(Path(f"{started[1]}.operations").read_text())
            self._expected[name] = self.tree()
        return self._expected[name]

    def operations(self, name: str) -> list[str]:
        self.expected(name)
        return self._operations[name]

    def stopped_in_work(self, name: str) -> tuple[int, Path]:
        """Start a command and let it stop where it has begun its output."""
        found = next(number for number, what in enumerate(self.operations(name), 1) if self._begins_output(what))
        started = self.stopped(name, found)
        assert started is not None
        return started

    def _begins_output(self, operation: str) -> bool:
        event, _, path = operation.partition(" ")
        return event in ("os.mkdir", "open") and ".tmp-" in path and "-work-" not in path

    def tree(self, top: Path | None = None) -> dict[str, str]:
        """Return name and content of everything below the outputs."""
        found = {}
        for path in sorted((top or self.out).rglob("*")):
            name = str(path.relative_to(self.out))
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_file():
                data = RECORD_TIME.sub(b"", path.read_bytes())
                found[name] = hashlib.sha256(re.sub(rb'"inputs": "\w+"', b"", data)).hexdigest()
            else:
                found[name] = "folder"
        return found

    def stopped(self, name: str, at: int) -> tuple[int, Path] | None:
        """Start a command of fresh inputs and let it stop at a file operation; None if it takes fewer."""
        self.fresh(COMMANDS[name])
        started = self.start(COMMANDS[name].arguments, stop_at=at)
        stop, end = Path(f"{started[1]}.stopped"), Path(f"{started[1]}.operations")
        wait_for(lambda: stop.exists() or end.exists())
        if stop.exists():
            return started
        self.end(started)
        return None

    def go(self, started: tuple[int, Path]) -> None:
        Path(f"{started[1]}.stopped").unlink()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("publishing")
    draw = np.random.default_rng(0)
    for name in ("one", "two"):
        for number in range(2):
            writer = ShardWriter(folder / "original" / name / str(number), np.uint16)
            for _ in range(20):
                ids = draw.integers(1, 900, draw.integers(5, 50))
                writer.add(ids, [len(ids)])
            assert writer.finish()
    (folder / "original" / "text").mkdir()
    for number in range(3):
        texts = [" ".join(map(str, draw.integers(0, 99, 20))) for _ in range(100)]
        pq.write_table(pa.table({"text": texts}), folder / "original" / "text" / f"{number}.parquet")
    program = [sys.executable, str(Path(__file__).with_name("command_server.py")), *MODULES]
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | ONE_THREAD_ENVIRONMENT | {"PYTHONPATH": root}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield Place(folder, server)
        assert server.stdin is not None
        server.stdin.close()


def again(place: Place, name: str) -> None:
    """The same command gives the expected files, and removes what is left of the others."""
    code, words = place.run(COMMANDS[name].arguments)
    assert code == 0, words
    assert "Traceback" not in words
    assert place.tree() == place.expected(name)


def interrupt(place: Place, name: str, number: signal.Signals, at: int) -> None:
    """Send a signal at a file operation."""
    expected = place.expected(name)
    if (started := place.stopped(name, at)) is None:
        return
    before = place.tree(place.out)
    os.kill(started[0], number)
    time.sleep(0.01)
    place.go(started)
    code, words = place.end(started)
    assert "Traceback" not in words, words
    made = COMMANDS[name].made
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code in (128 + number, 0), words
        assert code == 0 or words.splitlines()[-1].startswith("interrupted"), words
        left = [path for path in place.tree() if ".tmp-" in path or path.endswith(".lock")]
        assert set(left) <= {"meta/.lock"}
    if os.path.lexists(place.out / made):  # whole: of this command, or what was there before
        now = {key: value for key, value in place.tree().items() if key == made or key.startswith(f"{made}/")}
        wanted = {key: expected.get(key) for key in now if "lengths.png" not in key}
        assert {key: now[key] for key in wanted} == wanted or now.items() <= before.items()
    elif COMMANDS[name].over:
        assert number == signal.SIGKILL  # between two renames, if the file system cannot exchange them
    again(place, name)


def moments(place: Place, name: str, count: int) -> list[int]:
    """Return numbers of file operations: the last ones, which publish, and some others."""
    last = len(place.operations(name))
    every = [*range(max(1, last - count // 2), last + 1)]
    draw = random.Random(name)
    return sorted({*every, *(draw.randint(1, last) for _ in range(count))})


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_or_interrupted_command_leaves_nothing_half_and_goes_on(place: Place, name: str) -> None:
    draw = random.Random(name)
    for at in moments(place, name, 2):
        interrupt(place, name, draw.choice(SIGNALS), at)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_signal_at_twenty_moments(place: Place, name: str, number: signal.Signals) -> None:
    for at in moments(place, name, 20):
        interrupt(place, name, number, at)


@pytest.mark.parametrize(
    "others", [False, pytest.param(True, marks=pytest.mark.long)], ids=["the same", "other arguments"]
)
@pytest.mark.parametrize("name", COMMANDS)
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


@pytest.mark.parametrize("name", COMMANDS)
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
@pytest.mark.parametrize("name", WITH_INPUTS)
def test_an_input_that_changes_while_it_is_read_is_named(place: Place, name: str, how: str) -> None:
    place.expected(name)
    command = COMMANDS[name]
    started = place.stopped_in_work(name)
    before, path = place.tree(), place.inputs / command.reads
    if how == "changed":
        os.utime(path, (1, 1))
    elif how == "removed":
        path.unlink()
    else:
        shutil.copy2(path, place.inputs / "copy")
        os.replace(place.inputs / "copy", path)
    place.go(started)
    code, words = place.end(started)
    assert code == 1, words
    assert command.reads in words
    assert "Traceback" not in words
    assert command.over or not os.path.lexists(place.out / command.made)
    assert not [path for path in place.tree() if ".tmp-" in path]
    assert before is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_about_the_output(place: Place, name: str) -> None:
    """By a limit of a file's size."""
    place.fresh(COMMANDS[name])
    before = place.tree()
    code, words = place.run(COMMANDS[name].arguments, limit=5)
    assert code == 1, words
    assert "Traceback" not in words
    assert str(place.out) in words
    left = {path: value for path, value in place.tree().items() if path not in before}
    assert not [path for path in left if not path.startswith("meta")], left
    expected = place.expected(name)
    place.fresh(COMMANDS[name])
    assert place.run(COMMANDS[name].arguments)[0] == 0
    assert place.tree() == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_a_finished_command_is_done(place: Place, name: str) -> None:
    expected = place.expected(name)
    place.fresh(COMMANDS[name])
    for _ in range(2):
        code, words = place.run(COMMANDS[name].arguments)
        assert code == 0, words
        assert place.tree() == expected
