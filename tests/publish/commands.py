"""Commands that publish, their inputs, and the folder in which a server runs them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.cli import main as relayrun
from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.tokenize.processes import ONE_THREAD_ENVIRONMENT
from relayrun.trust import write_owned
from tests.chain.conftest import make_relay
from tests.config.test_trainer_configs import COMMAND, COMMON
from tests.history import began, make_history
from tests.mirrored import Mirrored
from tests.waiting import wait_for

SERVER_MODULES = {
    "text": (
        "numpy",
        "pyarrow.parquet",
        "tokenizers",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
        "relayrun.cli",
        "relayrun.cli.data.dumps",
        "relayrun.cli.data.inspect_data",
        "relayrun.cli.watch.report",
        "relayrun.submit.project",
        "relayrun.tokens.shuffle.reshard",
        "relayrun.tokens.tokenize.train_tokenizer",
        "relayrun.tokens.order.document_lengths",
        "relayrun.cli.model.checkpoint",
        "relayrun.cli.watch.runs",
        "relayrun.watch.report.page",
        "relayrun.watch.report.report_data",
        "relayrun.train.export.evaluate",
    ),
    "models": (
        "relayrun.cli.model.convert",
        "relayrun.train.export.megatron",
        "relayrun.train.export.huggingface",
    ),
}
"""Modules that a server imports before it forks, by the kind of the commands' inputs."""
CHANGING = re.compile(rb'"(time|since)": [0-9.]+|"directory": \[[^]]*\]|"inputs": "\w+"')
"""Parts of records that no two calls write the same."""


@dataclass(frozen=True)
class Command:
    """A command with `IN` and `OUT` in its arguments; `made` is its output below OUT."""

    arguments: str
    others: str
    made: str
    reads: str
    """An input, below IN."""
    opens: str = ""
    """An input that it opens in Python, below IN."""
    appears: str = ""
    """The file or folder that another process puts at the output; empty: `made`."""
    over: bool = False
    """A result of the other arguments stands at the output before."""
    inputs: str = "text"
    """Kind of its inputs, a key of `SERVER_MODULES`."""
    fills: bool = False
    """It writes file after file into a folder that may hold others, and replaces none."""
    terminal: bool = True
    """It shows its progress."""
    work: str = ".tmp-"
    """Part of the paths that it makes before it publishes."""
    keeps: str = r"meta(/\.lock|/raw-dataset-link)?"
    """Regular expression: paths below OUT that a command which was cut leaves on purpose."""
    owned: bool = False
    """All that lies at the output is its own: nobody else puts anything there."""
    inside: bool = True
    """It writes nothing but its output."""
    begins: str = ""
    """An input that lies at the output before, under its own name."""
    by_time: bool = False
    """A file of the same size and time is the same to it, as in a store."""


SHUFFLE = "dumps shuffle --dataset-folder IN/text --output-folder OUT/s --temp-dir OUT --file-size 0.002"
MIXTURE = "mixture create --folders IN/one IN/two --output OUT/mix --weights"
EVALUATION = "-m relayrun.train.export.evaluate --run-dir=OUT/evaluated"
TOKENIZER = "dumps tokenizer --dataset-folder IN/text --output-folder OUT/t --vocabulary-size"
TOKENIZE = (
    "dumps tokenize --output-folder OUT/sh --dataset IN/text --n-workers 1"
    " --paths-file IN/meta/dumps/paths_file_1.txt --tokenizer-name-or-path"
)
COMMANDS = {
    "merge": Command(
        "dumps merge --input IN/one IN/two --output-prefix OUT/m",
        "dumps merge --input IN/two IN/one --output-prefix OUT/m",
        "m.idx",
        "one/0.bin",
        opens="one/0.bin",
        appears="m.bin",
    ),
    "mixture": Command(f"{MIXTURE} 0.5 0.5", f"{MIXTURE} 0.3 0.7", "mix", "one/0.bin", "one/0.idx"),
    "mixture over one": Command(f"{MIXTURE} 0.5 0.5", f"{MIXTURE} 0.3 0.7", "mix", "one/0.bin", over=True),
    "shuffle": Command(SHUFFLE, f"{SHUFFLE} --seed 1", "s", "text/0.parquet"),
    "tokenizer": Command(f"{TOKENIZER} 300", f"{TOKENIZER} 320", "t", "text/0.parquet"),
    "prepare": Command(
        "dumps prepare --dataset-folder IN/text --preprocessing-metadata-folder OUT/meta --n-dumps 2",
        "dumps prepare --dataset-folder IN/text --preprocessing-metadata-folder OUT/meta --n-dumps 1",
        "meta/dumps",
        "",
    ),
    "tokenize": Command(
        f"{TOKENIZE} IN/t",
        f"{TOKENIZE} IN/t --append-eod",
        "sh/00000_tokens.idx",
        "text/1.parquet",
        work="_tokens.bin.tmp",
        keeps=r"sh(/\.lock|/logs(/.*)?|/\.progress(/.*)?|/tokenizer\.json|/0000._tokens\..*)?",
        owned=True,
        by_time=True,
    ),
    "lengths": Command(
        "data lengths IN/text --picture OUT/l.svg",
        "data lengths IN/text --picture OUT/l.svg --window 100",
        "l.svg",
        "",
    ),
    "report": Command("report IN/run --html OUT/r.html", "report IN/other --html OUT/r.html", "r.html", ""),
    "mirror": Command(
        "checkpoint mirror IN/mirrored",
        "checkpoint mirror IN/mirrored --verify",
        "place/run/copies.jsonl",
        "",
        work="/.staging/",
        keeps=r"place(/run(/\.staging(/.*)?|/mirror\.json|/iter_\d+(/.*)?)?)?",
        owned=True,
        inside=False,
    ),
    "restore": Command(
        "checkpoint restore IN/copies/run:30 --to OUT/r",
        "checkpoint restore IN/copies/run:20 --to OUT/r",
        "r/iter_0000030",
        "",
        work="/.staging/",
        keeps=r"r(/\.staging(/.*)?)?",
    ),
    "archive": Command(
        "runs archive IN/ended --to OUT",
        "runs archive IN/ended --to OUT",
        "in/ended",
        "",
        work=".relayrun-moving-",
        keeps=r"in(/\.relayrun-moving-ended(/.*)?|/ended/\.submit\.lock)?",
        inside=False,
    ),
    "move": Command(
        "runs move IN/ended OUT/m",
        "runs move IN/ended OUT/m",
        "m",
        "",
        work=".relayrun-moving-",
        keeps=r"\.relayrun-moving-m(/.*)?|m/\.submit\.lock",
        inside=False,
    ),
    "evaluation": Command(
        f"{EVALUATION} --iteration=7 --attempt=1",
        f"{EVALUATION} --iteration=7 --attempt=1",
        "evaluated/evaluations/iter_0000007-0001/result.json",
        "",
        owned=True,
        inside=False,
        terminal=False,
        begins="evaluated",
    ),
    "init": Command("init OUT/p --cluster local", "", "p", "", terminal=False, fills=True),
    "export hf": Command(
        "export hf IN/run --output OUT/e",
        "export hf IN/run --output OUT/e --dtype float16",
        "e",
        "run/checkpoints/iter_0000007/common.pt",
        "run/checkpoints/iter_0000007/common.pt",
        inputs="models",
    ),
    "export torch": Command(
        "export torch IN/megatron --output OUT/e --tokenizer IN/hf",
        "export torch IN/megatron --output OUT/e --tokenizer IN/hf --transformer-impl local",
        "e",
        "megatron/iter_0000007/common.pt",
        "megatron/iter_0000007/common.pt",
        inputs="models",
    ),
    "export megatron": Command(
        "export megatron IN/run --output OUT/e",
        "export megatron IN/other --output OUT/e",
        "e",
        "run/checkpoints/iter_0000007/common.pt",
        "run/checkpoints/iter_0000007/common.pt",
        inputs="models",
    ),
    "import hf": Command(
        "import hf IN/hf --output OUT/c",
        "import hf IN/hf --output OUT/c --dtype float16",
        "c",
        "hf/model.safetensors",
        "hf/config.json",
        inputs="models",
    ),
    "import megatron": Command(
        "import megatron IN/megatron --output OUT/c",
        "import megatron IN/megatron --output OUT/c --weights-only",
        "c",
        "megatron/iter_0000007/common.pt",
        "megatron/iter_0000007/common.pt",
        inputs="models",
    ),
}


class Place:
    """Inputs and outputs of commands, and the server that runs them."""

    def __init__(self, folder: Path, server: subprocess.Popen[str], lacking: str) -> None:
        self.no_faults = lacking
        """Why no disk can be made to fail; empty: it can."""
        self.folder, self.inputs, self.out, self._server = folder, folder / "in", folder / "out", server
        self._number = 0
        self.beginning: dict[str, str] = {}
        """What lay at the outputs when they were last made anew."""
        self._expected: dict[str, dict[str, str]] = {}
        self._operations: dict[str, list[str]] = {}

    def fresh(self, command: Command) -> None:
        """Empty the outputs and make the inputs anew."""
        for path in (self.out, self.inputs):
            shutil.rmtree(path, ignore_errors=True)
        self.out.mkdir(parents=True)
        shutil.copytree(self.folder / "original", self.inputs, symlinks=True)
        if command.begins:
            shutil.move(self.inputs / command.begins, self.out)
        for plan in self.inputs.rglob("plan.json"):  # a copy of a run belongs to nobody
            write_owned(plan, json.loads(plan.read_bytes()))
        if command.over:
            assert self.run(command.others)[0] == 0
        self.beginning = self.tree()

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
        every, command = self.operations(name), COMMANDS[name]
        found = next(number for number, what in enumerate(every, 1) if self._begins_output(what, command))
        started = self.stopped(name, stop_at=found)
        assert started is not None
        return started

    def _begins_output(self, operation: str, command: Command) -> bool:
        event, _, path = operation.partition(" ")
        return event in ("os.mkdir", "open") and command.work in path and "-work-" not in path

    def tree(self, top: Path | None = None) -> dict[str, str]:
        """Return name and content of everything below the outputs."""
        found = {}
        for path in sorted((top or self.out).rglob("*")):
            name = str(path.relative_to(self.out))
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_file():
                found[name] = hashlib.sha256(CHANGING.sub(b"", path.read_bytes())).hexdigest()
            else:
                found[name] = "folder"
        return found

    def left(self, name: str) -> set[str]:
        """Return the paths that a command which was cut should have removed."""
        command, found = COMMANDS[name], self.tree()
        kept = re.compile(command.keeps)
        temporary = {path for path in found if ".tmp-" in path or path.endswith(".lock") or command.work in path}
        return {path for path in temporary if not kept.fullmatch(path)}

    def stopped(self, name: str, **where: object) -> tuple[int, Path] | None:
        """Start a command of fresh inputs and let it stop, as `command_server` says; None if it does not."""
        self.fresh(COMMANDS[name])
        started = self.start(COMMANDS[name].arguments, **where)
        stop, end = Path(f"{started[1]}.stopped"), Path(f"{started[1]}.operations")
        wait_for(lambda: stop.exists() or end.exists())
        if stop.exists():
            return started
        self.end(started)
        return None

    def go(self, started: tuple[int, Path]) -> None:
        Path(f"{started[1]}.stopped").unlink()


def make_texts(folder: Path) -> None:
    """Make shards, files of text, and two runs with a past."""
    draw = np.random.default_rng(0)
    for name in ("one", "two"):
        for number in range(2):
            writer = ShardWriter(folder / name / str(number), np.uint16)
            for _ in range(20):
                ids = draw.integers(1, 900, draw.integers(5, 50))
                writer.add(ids, [len(ids)])
            assert writer.finish()
    (folder / "text").mkdir()
    for number in range(3):
        texts = [" ".join(map(str, draw.integers(0, 99, 20))) for _ in range(100)]
        pq.write_table(pa.table({"text": texts}), folder / "text" / f"{number}.parquet")
    assert relayrun([*TOKENIZER.replace("OUT", "IN").replace("IN", str(folder)).split(), "300"]) == 0
    prepare = COMMANDS["prepare"].arguments.replace("OUT", "IN").replace("IN", str(folder)).split()
    assert relayrun(prepare) == 0
    for name, attempts in (("run", 2), ("other", 3), ("ended", 1)):
        make_history(folder / name, lines=30, attempts=attempts)
    shutil.rmtree(folder / "ended/local")
    (folder / "ended/STOP").write_text("done: all\n")
    for name, place in (("mirrored", folder.parent / "out/place"), ("copied", folder / "copies")):
        make_mirrored(folder / name, place)
    (folder.parent / "out").mkdir()
    assert relayrun(["checkpoint", "mirror", str(folder / "copied")]) == 0
    make_evaluated(folder.parent / "out/evaluated")
    shutil.move(folder.parent / "out/evaluated", folder)


def make_mirrored(folder: Path, place: Path) -> None:
    """Make a run with two checkpoints, and their place for copies."""
    made = Mirrored(partial(make_relay, folder.parent), folder.parent, name=folder.name)
    made.place = place / "run"
    made.policy(keep_last=1 if folder.name == "mirrored" else 2)
    for iteration in (20, 30):
        made.save(iteration)


CONVERT = "import pathlib, sys; m = pathlib.Path(sys.argv[1]); m.mkdir(); (m / 'config.json').write_text('{}')"
SCORE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"own\": 0.25}')"


def make_evaluated(folder: Path) -> None:
    """Make a run of a program of somebody, with a checkpoint that is to be evaluated by two commands."""
    run = Run(folder)
    run.config.mkdir(parents=True)
    evaluation = {
        "interval": 7,
        "convert": ["{python}", "-c", CONVERT, "{model}"],
        "command": ["{python}", "-c", SCORE, "{results}"],
    }
    values = COMMON | COMMAND | {"run_dir": str(folder), "evaluation": evaluation}
    run.config_revision(1).write_text(dump_yaml(values))
    began(run, 1, start_time=0.0)
    run.checkpoints.mkdir()
    (run.checkpoints / "step-7").write_text("weights")
    commit = CheckpointCommit(iteration=7, path=str(run.checkpoints / "step-7"), consumed_samples=-1, time=1, seconds=1)
    run.attempt(1).append_commit(commit)
    run.evaluations.mkdir()
    EvaluationPolicy(interval=7, total_steps=0, hold=3, time_limit=60).write(run.evaluation_policy)


def make_models(folder: Path) -> None:
    """Make a folder of transformers, two runs with a checkpoint and Adam's state, and a folder of Megatron-LM."""
    from tests.export.models import make_hf  # torch
    from tests.export.trained import make_trained

    hf = make_hf(folder / "hf")
    for name in ("run", "other"):
        make_trained(folder / name, hf)
    assert relayrun(["export", "megatron", str(folder / "run"), "--output", str(folder / "megatron")]) == 0


INPUTS: dict[str, Callable[[Path], None]] = {"text": make_texts, "models": make_models}


def faulty_disk(folder: Path) -> tuple[dict[str, str], str]:
    """Compile `faults.c`; return the environment that loads it, or none and the reason."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return {}, "disks that fail: this machine has no C compiler"
    source, made = Path(__file__).with_name("faults.c"), folder / "faults.so"
    words = [compiler, "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {}, f"disks that fail: {compiler} cannot compile {source.name}: {done.stderr}"
    return {"LD_PRELOAD": str(made)}, ""


@contextmanager
def serve(folder: Path, kind: str) -> Iterator[Place]:
    """Make the inputs of a kind, and run a server for its commands."""
    INPUTS[kind](folder / "in")  # runs and checkpoints hold their own places
    shutil.copytree(folder / "in", folder / "original")
    program = [sys.executable, str(Path(__file__).with_name("command_server.py")), *SERVER_MODULES[kind]]
    root = str(Path(__file__).resolve().parents[2])
    faults, lacking = faulty_disk(folder)
    environment = os.environ | ONE_THREAD_ENVIRONMENT | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"} | faults
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield Place(folder, server, lacking)
        assert server.stdin is not None
        server.stdin.close()
