"""SIGKILL at any moment costs a shard of work and no byte: a rerun gives the files of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.tokens.shards.shard import Shard
from tests import warm
from tests.tokenization_corpus import TEXTS, train_tokenizer, write_parquet
from tests.tokens.test_preprocess import door, workers_of
from tests.waiting import wait_for

FILES = 12


class Workplace:
    """A dataset, and runs over it into folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = train_tokenizer(folder / "tok" / "tokenizer.json")
        self.data = folder / "data"
        self.data.mkdir()
        generator = random.Random(0)
        for number in range(FILES):
            texts = ["".join(generator.choices(TEXTS, k=40)) for _ in range(60)]
            write_parquet(self.data / f"{number:02d}.parquet", texts)
        self.paths = folder / "paths"
        self.paths.write_text("".join(f"{number:02d}.parquet\n" for number in range(FILES)))

    def command(self, out: Path, workers: int) -> list[str]:
        options = ("--n-tasks", str(FILES), "--n-workers", str(workers))
        return door(self.tokenizer, self.data, self.paths, out, *options)

    def finish(self, out: Path) -> dict[str, bytes]:
        """Run to the end; the bytes of all shards."""
        warm.run(self.command(out, 2), check=True)
        record = json.loads((out / "tokenization.json").read_text())
        assert sorted(record["shards"]) == sorted(record["parts"])
        for name, task in record["shards"].items():
            assert Shard.open(out / name).tokens == task["tokens"]
        assert not [*out.glob("*.tmp"), *out.rglob(".tmp-*")]
        return {file.name: file.read_bytes() for file in out.iterdir() if file.suffix in (".bin", ".idx")}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def undisturbed(workplace: Workplace) -> tuple[dict[str, bytes], float]:
    """What an undisturbed run writes, and its seconds."""
    started = time.monotonic()
    files = workplace.finish(workplace.folder / "undisturbed")
    assert len(files) == 2 * FILES
    return files, time.monotonic() - started


FORCED = {
    "before the .bin rename": "at = lambda a, b: str(b).endswith('00003_tokens.bin'); after = False",
    "between the renames": "at = lambda a, b: str(b).endswith('00003_tokens.bin'); after = True",
    "before the manifest record": "at = lambda a, b: str(b).endswith('00003_tokens.idx'); after = True",
}

KILLER = """
import os, runpy, signal, sys
{where}
rename = os.replace
def replace(a, b, **options):
    if at(a, b) and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(a, b, **options)
    if at(a, b):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", FORCED)
def test_a_kill_at_the_worst_moment_leaves_the_same_files(
    workplace: Workplace, undisturbed: tuple[dict[str, bytes], float], tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    command = workplace.command(out, workers=1)
    program = [sys.executable, "-c", KILLER.format(where=FORCED[point]), *command[1:]]
    assert warm.run(program).returncode == -signal.SIGKILL
    names = {file.name for file in out.iterdir()}
    assert ("00003_tokens.bin" in names) == (point != "before the .bin rename")
    assert ("00003_tokens.idx" in names) == (point == "before the manifest record")
    assert "00003_tokens" not in json.loads((out / "tokenization.json").read_text())["shards"]
    assert workplace.finish(out) == undisturbed[0]


@pytest.mark.slow
def test_a_kill_while_the_record_is_written_leaves_nothing_behind(
    workplace: Workplace, undisturbed: tuple[dict[str, bytes], float], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    where = "at = lambda a, b: str(b).endswith('tokenization.json'); after = False"
    program = [sys.executable, "-c", KILLER.format(where=where), *workplace.command(out, workers=1)[1:]]
    assert warm.run(program).returncode == -signal.SIGKILL
    assert list(out.rglob(".tmp-*"))
    assert workplace.finish(out) == undisturbed[0]
    assert not list(out.rglob(".tmp-*"))


def kill_somewhere(workplace: Workplace, undisturbed: tuple[dict[str, bytes], float], out: Path, seed: int) -> None:
    generator = random.Random(seed)
    moment, victim = generator.uniform(0, undisturbed[1]), generator.choice(["worker", "parent"])
    print(f"seed {seed}: SIGKILL to the {victim} after {moment:.2f} s of {undisturbed[1]:.2f}")
    process = subprocess.Popen(workplace.command(out, workers=2), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(moment)
    workers = workers_of(process.pid)
    try:
        os.kill(generator.choice(workers) if victim == "worker" and workers else process.pid, signal.SIGKILL)
    except ProcessLookupError:
        print("it was done already")
    process.communicate(timeout=300)
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), words="no worker is left")
    for file in out.glob("*.idx"):  # whatever stands under a final name is whole, or has no .idx yet
        Shard.open(file.with_suffix(""))
    assert workplace.finish(out) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_a_kill_at_any_moment_leaves_the_same_files(
    workplace: Workplace, undisturbed: tuple[dict[str, bytes], float], tmp_path: Path, seed: int
) -> None:
    kill_somewhere(workplace, undisturbed, tmp_path / "out", seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_kills_at_any_moment_leave_the_same_files(
    workplace: Workplace, undisturbed: tuple[dict[str, bytes], float], tmp_path: Path, seed: int
) -> None:
    kill_somewhere(workplace, undisturbed, tmp_path / "out", seed)
