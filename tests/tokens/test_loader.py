"""`relayrun.loader` in a program of one's own: batches, states, changes of ranks and mixtures."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.loader import Loader
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture.build_datasets import training_order
from relayrun.tokens.streams import samples
from relayrun.tokens.streams.lane_cursor import LaneCursor
from tests import streaming
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
LENGTH, BATCH = 64, 12


def shards(workspace: Workspace, **weights: float) -> dict[str, Any]:
    mixture = {
        name: {"path": str(workspace.folder / "data" / files), "weight": weights[name]}
        for name, files in (("web", "shard[01]"), ("code", "shard2"))
        if name in weights
    }
    return {"tokenizer": str(workspace.folder / "tokenizer.json"), "mixture": mixture}


def text(workspace: Workspace) -> dict[str, Any]:
    """Streams of text, whose samples have no numbers."""
    folder = workspace.folder
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(folder / "bytes")]) == 0
    streaming.write(folder / "web", "parquet", [200, 300, 100])
    streaming.write(folder / "code", "parquet", [150, 90], first=1000)
    mixture = {name: {"path": str(folder / name), "source": "parquet", "weight": 1} for name in ("web", "code")}
    return {"tokenizer": str(folder / "bytes"), "mixture": mixture, "lanes": 12}


class Ranks:
    """Loaders of all ranks, in threads of one process where they call each other."""

    def __init__(self, data: dict[str, Any], count: int, **settings: Any) -> None:
        self._barrier, self._said = threading.Barrier(count, timeout=120), [None] * count
        self.loaders = [
            Loader(
                data,
                **{"seq_length": LENGTH, "batch_size": BATCH, "gather": self._gather(rank)} | settings,
                rank=rank,
                world_size=count,
            )
            for rank in range(count)
        ]

    def _gather(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._said[rank] = value
            self._barrier.wait()
            found = json.loads(json.dumps(self._said))
            self._barrier.wait()
            return found

        return gather

    def batch(self) -> list[list[int]]:
        """Rows of the next batch, all ranks' shares one after the other."""
        return [row.tolist() for loader in self.loaders for row in next(loader)["input_ids"]]

    def state(self) -> dict[str, Any]:
        states: list[Any] = [None] * len(self.loaders)

        def ask(rank: int) -> None:
            states[rank] = self.loaders[rank].state_dict()

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        words = {json.dumps(state, sort_keys=True) for state in states}
        assert len(words) == 1
        assert len(words.copy().pop()) < 16_384
        return json.loads(words.pop())

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def same(found: list[list[int]], expected: list[list[int]], *, sets: bool) -> bool:
    return sorted(found) == sorted(expected) if sets else found == expected


def test_batches_are_those_of_a_run(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    data = shards(workspace, web=3, code=1)
    config = resolve.load_run_config(workspace.config("run", data=data | {"datasets": []}))
    order = training_order(resolve.require_native(config), build_manifest(config))
    with Loader(data, seq_length=LENGTH, batch_size=BATCH, seed=config.training.seed) as loader:
        for k, batch in zip(range(5), loader, strict=False):
            rows = np.stack([order.row(number).tokens for number in range(k * BATCH, (k + 1) * BATCH)])
            assert batch["input_ids"].tolist() == rows[:, :-1].tolist()
            assert batch["labels"].tolist() == rows[:, 1:].tolist()
        assert loader.position == 5 * BATCH
        assert sum(loader.ledger().values()) == 5 * BATCH


@pytest.mark.parametrize("source", [shards, text])
def test_a_state_goes_on_exactly_on_any_number_of_ranks(tmp_path: Path, source: Any) -> None:
    workspace = Workspace.make(tmp_path)
    data = shards(workspace, web=3, code=1) if source is shards else text(workspace)
    whole = Ranks(data, 1)
    expected = [whole.batch() for _ in range(14)]
    whole.close()
    choose, k, state = random.Random(5), 0, None
    while k < len(expected):
        ranks = Ranks(data, choose.choice([1, 2, 3, 4, 6]))
        if state is not None:
            ranks.load(state)
        for _ in range(choose.randint(1, 4)):
            if k < len(expected):
                assert same(ranks.batch(), expected[k], sets=source is text), k
                k += 1
        state = ranks.state()
        for _ in range(choose.randint(0, 2)):  # batches that a kill loses
            ranks.batch()
        ranks.close()


@pytest.mark.parametrize("source", [shards, text])
def test_without_reading_ahead_it_starts_no_thread_and_gives_the_same(tmp_path: Path, source: Any) -> None:
    workspace = Workspace.make(tmp_path)
    data = shards(workspace, web=3, code=1) if source is shards else text(workspace)
    ahead, alone, threads = Ranks(data, 2), Ranks(data, 2, read_ahead=False), threading.active_count()
    found = [alone.batch() for _ in range(9)]
    state = alone.state()
    assert threading.active_count() == threads
    alone.load(state)
    found += [alone.batch() for _ in range(5)]
    assert threading.active_count() == threads
    assert found == [ahead.batch() for _ in range(14)]
    ahead.close()


def test_a_resume_in_a_process_does_not_prove_its_engine_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof was a third of the time to the first batch of a new loader."""
    found: list[str] = []
    sample_texts = samples.sample_texts

    def noted(column: str, *others: Any, **named: Any) -> Any:
        found.append(column)
        return sample_texts(column, *others, **named)

    monkeypatch.setattr(samples, "sample_texts", noted)
    data = text(Workspace.make(tmp_path))
    for _ in range(2):
        ranks = Ranks(data, 1)
        ranks.batch()
        ranks.close()
    assert len(found) == 2  # of web and of code


def test_a_changed_mixture_begins_at_the_state_and_other_data_are_refused(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    first = Ranks(shards(workspace, web=3, code=1), 1)
    for _ in range(3):
        first.batch()
    state, counts = first.state(), first.loaders[0].ledger()
    first.close()
    changed = Ranks(shards(workspace, code=1), 1)
    changed.load(state)
    changed.batch()
    assert changed.loaders[0].ledger() == counts | {"code": counts["code"] + BATCH}
    changed.close()
    with pytest.raises(FatalTrainingError, match="seed was 1234, is 7"):
        Ranks(shards(workspace, web=3, code=1), 1, seed=7).load(state)
    with pytest.raises(FatalTrainingError, match="seq_length was 64, is 32"):
        Ranks(shards(workspace, web=3, code=1), 1, seq_length=32).load(state)
    with pytest.raises(ConfigError, match="version None"):
        Ranks(shards(workspace, code=1), 1).load({})


@pytest.mark.parametrize("source", [shards, text])
def test_data_commands_read_the_records_of_a_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Any
) -> None:
    workspace = Workspace.make(tmp_path)
    data = shards(workspace, web=3, code=1) if source is shards else text(workspace)
    rows = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with Loader(data, seq_length=LENGTH, batch_size=BATCH, seed=seed) as loader:
            for _ in range(3):
                rows.append(next(loader)["input_ids"].tolist())
                loader.record(tmp_path / name, loader.state_dict())
            ledger = loader.ledger()
    capsys.readouterr()
    assert main(["data", "ledger", str(tmp_path / "c")]) == 0
    said = capsys.readouterr().out
    assert f"c: {3 * BATCH} samples in 3 steps" in said
    for name, count in ledger.items():
        assert re.search(rf"{name} .* {count} ", said), said
    assert main(["data", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["data", "diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "first different sample: 0" in capsys.readouterr().out
    assert main(["data", "show", str(tmp_path / "a"), "--samples", f"{2 * BATCH}:{3 * BATCH}", "--full"]) == 0
    shown = capsys.readouterr().out
    assert f"sample {2 * BATCH}: " in shown
    assert "step 3" in shown
    if source is shards:
        assert all(" ".join(f"w{token}" for token in row) in shown for row in rows[2])
    with Loader(data, seq_length=LENGTH, batch_size=BATCH, seed=1) as loader:
        next(loader)
        loader.record(tmp_path / "a", loader.state_dict())
    assert main(["data", "ledger", str(tmp_path / "a")]) == 0
    assert f"a: {BATCH} samples in 1 steps" in capsys.readouterr().out


def test_text_on_several_ranks_needs_a_gather(tmp_path: Path) -> None:
    data = text(Workspace.make(tmp_path))
    with Loader(data, seq_length=LENGTH, batch_size=BATCH, world_size=2) as loader:
        next(loader)
        with pytest.raises(ConfigError, match="gather"):
            loader.state_dict()


def test_wrong_sizes_and_unknown_settings_are_refused(tmp_path: Path) -> None:
    data = shards(Workspace.make(tmp_path), code=1)
    for wrong in ({"world_size": 5}, {"rank": 1}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match="batch_size"):
            Loader(data, **{"seq_length": LENGTH, "batch_size": BATCH} | wrong)
    with pytest.raises(ConfigError, match="mixtures"):
        Loader(data | {"mixtures": {}}, seq_length=LENGTH, batch_size=BATCH)


def test_torchs_data_loader_takes_it_with_a_worker_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", True)  # it would stay
    data = shards(Workspace.make(tmp_path), web=3, code=1)
    with Loader(data, seq_length=LENGTH, batch_size=BATCH) as loader:
        expected = [batch["input_ids"].tolist() for batch in islice(loader, 4)]
    for workers in (0, 1):
        with Loader(data, seq_length=LENGTH, batch_size=BATCH) as loader:
            batches = torch.utils.data.DataLoader(loader.as_torch(), batch_size=None, num_workers=workers)
            found = [batch["input_ids"] for batch in islice(batches, 4)]
            assert all(isinstance(one, torch.Tensor) for one in found)
            assert [one.tolist() for one in found] == expected
    batches = torch.utils.data.DataLoader(loader.as_torch(), batch_size=None, num_workers=2)
    with pytest.raises(Exception, match="2 workers would read the same samples"):
        next(iter(batches))


def test_the_import_loads_neither_torch_nor_pydantic() -> None:
    program = "import sys, relayrun.loader; print({'torch', 'pydantic', 'pyarrow', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_first_batch_of_long_texts_imports_no_functions_of_arrow(tmp_path: Path) -> None:
    """Their import takes as long as that of Arrow."""
    data = text(Workspace.make(tmp_path))
    for name, source in data["mixture"].items():
        source["path"] = str(tmp_path / f"{name}.parquet")
        pq.write_table(pa.table({"text": [f"{number} words " * 1300 for number in range(500)]}), source["path"])
    program = (
        "import json, sys; from relayrun.loader import Loader; from itertools import islice\n"
        f"loader = Loader(json.loads(sys.argv[1]), seq_length={LENGTH}, batch_size={BATCH}, read_ahead=False)\n"
        "print(len([*islice(loader, 3)]), {'pyarrow.compute', 'pandas', 'torch'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", program, json.dumps(data)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "3 set()"


READS_WITH_THE_EXTRA = """
import importlib.metadata, json, re, sys

def with_dependencies(wanted):
    found, left = {"relayrun"}, [*wanted]
    while left:
        name = re.match("[A-Za-z0-9_.-]+", left.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                left += [each for each in importlib.metadata.requires(name) or [] if "extra ==" not in each]
            except importlib.metadata.PackageNotFoundError:  # of another Python or system
                pass
    return found

allowed, owners = with_dependencies(json.loads(sys.argv[1])), importlib.metadata.packages_distributions()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        of = {each.lower().replace("_", "-") for each in owners.get(name, [])}
        if of and not of & allowed:
            raise ModuleNotFoundError(f"nothing brings {name}", name=name)

sys.meta_path.insert(0, Refuse())
from relayrun.loader import Loader
with Loader(json.loads(sys.argv[2]), seq_length=64, batch_size=12) as loader:
    print(next(loader)["input_ids"].shape, "torch" in allowed)
"""


@pytest.mark.parametrize("source", [shards, text])
def test_the_extra_brings_what_a_loader_imports(tmp_path: Path, source: Any) -> None:
    """Packages that neither the base nor, for text, the extra `loader` asks for cannot be imported there."""
    workspace = Workspace.make(tmp_path)
    data = shards(workspace, web=3, code=1) if source is shards else text(workspace)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"]["loader"] if source is text else [])
    command = [sys.executable, "-c", READS_WITH_THE_EXTRA, json.dumps(wanted), json.dumps(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "(12, 64) False\n", done.stderr


def test_the_pages_program_runs(tmp_path: Path) -> None:
    """The first block of docs/how-to/loader.md, on data of the names that it uses."""
    workspace = Workspace.make(tmp_path)
    (tmp_path / "shards").mkdir()
    for name, files in (("web", "shard[01].*"), ("code", "shard2.*")):
        (tmp_path / "shards" / name).mkdir()
        for file in (workspace.folder / "data").glob(files):
            file.rename(tmp_path / "shards" / name / file.name)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer" / "tokenizer.json")
    program = (ROOT / "docs/how-to/loader.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["(8, 128) (8, 128)"] * 10, done.stderr


@pytest.mark.parametrize("make", [lambda workspace: shards(workspace, web=3, code=1), text], ids=["shards", "text"])
def test_a_state_far_on_is_read_in_a_second(tmp_path: Path, make: Any) -> None:
    """Sample 10^9, and of text an epoch far on."""
    data = make(Workspace.make(tmp_path))
    with Loader(data, seq_length=LENGTH, batch_size=BATCH) as loader:
        next(loader)
        state = loader.state_dict(None if "lanes" in data else 999_999_996)
    if "lanes" in data:
        state |= {"consumed_samples": 999_999_996, "counts": dict.fromkeys(("code", "web"), 499_999_998)}
        for name in state["streams"]:
            state["streams"][name] = {"at": 999_999_996, "cursors": [[*LaneCursor(epoch=10**6)]] * 12}
    with Loader(data, seq_length=LENGTH, batch_size=BATCH) as loader:
        begin = time.process_time()
        loader.load_state_dict(state)
        assert next(loader)["input_ids"].shape == (BATCH, LENGTH)
        assert time.process_time() - begin < 1
        assert loader.position == 999_999_996 + BATCH


@pytest.mark.long
def test_the_memory_of_a_hundred_million_tokens_is_that_of_the_first_ten(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(tmp_path / "bytes")]) == 0
    texts = [f"{number} " * 2000 for number in range(3000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "web/0.parquet", row_group_size=100)
    mixture = {"web": {"path": str(tmp_path / "web"), "source": "parquet", "weight": 1}}
    data = {"tokenizer": str(tmp_path / "bytes"), "mixture": mixture, "lanes": 8}
    found = subprocess.run(
        [sys.executable, "-c", READS_ON, json.dumps(data)], stdout=subprocess.PIPE, check=True
    ).stdout
    early, late = map(int, found.split())
    assert late < 1.1 * early


READS_ON = """
import json, resource, sys
from relayrun.loader import Loader
with Loader(json.loads(sys.argv[1]), seq_length=4096, batch_size=8) as loader:
    for batch in loader:
        if loader.position % 4000 == 0:
            loader.state_dict()
        if loader.position * 4096 in (16_384_000 * 2, 16_384_000 * 7):
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if loader.position * 4096 > 16_384_000 * 7:
            break
"""
