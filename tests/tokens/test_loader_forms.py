"""The forms of `relayrun.loader` for torch, transformers and megatron-core, and histories of all of them beside the raw
files: kills, numbers of ranks, workers, changes of the mixture."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from relayrun.errors import ConfigError
from relayrun.loader import Loader
from tests.tokens.test_loader import BATCH, LENGTH, Ranks, shards, text
from tests.workspace import Workspace

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", True)  # it would stay


def opened(data: dict[str, Any], **settings: Any) -> Loader:
    return Loader(data, **{"seq_length": LENGTH, "batch_size": BATCH} | settings)


def arguments(**changes: Any) -> SimpleNamespace:
    """Those of a Trainer that one process runs, with two micro-batches in a step."""
    own = {"train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2, "world_size": 1, "ignore_data_skip": True}
    return SimpleNamespace(**own | {"remove_unused_columns": False} | changes)


class TrainerLike:
    """Takes samples as transformers' Trainer does: batches ahead of the step, the callback at its moments."""

    def __init__(self, loader: Loader, saved: dict[str, Any] | None = None) -> None:
        form = loader.for_trainer()
        self.callback = form
        past = {} if saved is None else {"TrainerSamples": json.loads(json.dumps(saved))}
        step = 0 if saved is None else saved["step"]
        self.state = SimpleNamespace(global_step=step, stateful_callbacks=past)
        self.callback.on_train_begin(arguments(), self.state, None)
        self._batches = iter(torch.utils.data.DataLoader(form, batch_size=BATCH // 2))
        self._ahead = [next(self._batches), next(self._batches)]

    def step(self) -> list[list[int]]:
        self._ahead += [next(self._batches), next(self._batches)]
        rows = [row for half in self._ahead[:2] for row in half["input_ids"].tolist()]
        del self._ahead[:2]
        self.state.global_step += 1
        return rows

    def save(self) -> dict[str, Any]:
        return self.callback.state() | {"step": self.state.global_step}


@pytest.mark.parametrize("source", [shards, text])
def test_a_trainer_goes_on_behind_what_it_trained_on(tmp_path: Path, source: Any) -> None:
    workspace = Workspace.make(tmp_path)
    data = shards(workspace, web=3, code=1) if source is shards else text(workspace)
    with opened(data) as loader:
        expected = [next(loader)["input_ids"].tolist() for _ in range(8)]
    saved = None
    for first, end in ((0, 3), (3, 5), (5, 8)):
        with opened(data) as loader:
            trainer = TrainerLike(loader, saved)
            assert [trainer.step() for _ in range(first, end)] == expected[first:end]
            assert loader.position > end * BATCH, "it reads ahead"
            saved = trainer.save()
            assert len(json.dumps(saved)) < 16_384


def with_ends(workspace: Workspace, **weights: float) -> dict[str, Any]:
    """Shards of a mixture, with the token that ends documents in the place of another one."""
    for path in (workspace.folder / "data").glob("*.bin"):
        tokens = np.fromfile(path, np.uint16)
        tokens[tokens == 16] = 0
        tokens.tofile(path)
    return shards(workspace, **weights) | {"eod_mask_loss": True}


def test_a_trainers_model_takes_the_labels_as_they_are(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **small))
    data = with_ends(Workspace.make(tmp_path), code=1)
    with opened(data) as loader:
        batch = next(loader)
        loader.load_state_dict(opened(data).state_dict())
        sample = next(iter(loader.for_trainer()))
    assert (batch["loss_mask"][0] == 0).any()
    right = torch.where(torch.from_numpy(batch["loss_mask"][0]) == 0, -100, torch.from_numpy(batch["labels"][0]))
    assert sample["shift_labels"].tolist() == sample["labels"].tolist() == right.tolist()
    given = {name: value[None] for name, value in sample.items()}
    found = model(**given)
    own = torch.nn.functional.cross_entropy(found.logits[0], right)
    assert found.loss.item() == pytest.approx(own.item(), rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_a_trainer_share_the_rows_of_a_step_and_resume(tmp_path: Path) -> None:
    """Two processes, two micro-batches a step, a resume from the checkpoint of step 2."""
    data = shards(Workspace.make(tmp_path), web=3, code=1)
    (tmp_path / "data.json").write_text(json.dumps(data))
    with opened(data) as loader:
        expected = [next(loader)["input_ids"].tolist() for _ in range(4)]
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(ROOT / "tests/trainer_ranks.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows: list[list[list[int]]] = []
    for steps in (2, 4):
        arguments = [str(tmp_path / "data.json"), str(tmp_path), str(steps)]
        subprocess.run([sys.executable, *words, *arguments], env=environment, check=True, timeout=600)
        ranks = [json.loads((tmp_path / f"rank-{rank}-{steps}.json").read_text()) for rank in range(2)]
        halves = [one + other for one, other in zip(*ranks, strict=True)]  # of one micro-batch
        rows += [halves[at] + halves[at + 1] for at in range(0, len(halves), 2)]
    assert rows == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient_accumulation_steps": 1}, "a step of the Trainer takes 6 samples"),
        ({"world_size": 2}, "a step of the Trainer takes 24 samples"),
        ({"ignore_data_skip": False}, "would skip samples"),
        ({"remove_unused_columns": True}, "leave out shift_labels"),
    ],
)
def test_arguments_with_which_a_trainer_would_read_other_samples_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    callback = opened(shards(Workspace.make(tmp_path), code=1)).for_trainer()
    state = SimpleNamespace(global_step=0, stateful_callbacks={})
    with pytest.raises(ConfigError, match=words):
        callback.on_train_begin(arguments(**change), state, None)
    state.global_step = 3
    with pytest.raises(ConfigError, match="saved without this callback"):
        callback.on_train_begin(arguments(), state, None)


def test_a_state_of_an_earlier_position_is_the_one_that_was_there(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    streams = text(workspace)
    for data in (shards(workspace, web=3, code=1), streams):
        with opened(data) as loader, opened(data) as other:
            for _ in range(4):
                next(loader)
            for k in range(3):
                assert loader.state_dict(k * BATCH) == other.state_dict()
                next(other)
            assert loader.state_dict() != other.state_dict()
            if data is not streams:
                continue
            for wrong in (0, 5 * BATCH):  # older ones are forgotten, and later ones are not read
                with pytest.raises(
                    ConfigError, match=f"position {wrong} of text is not between {4 * BATCH} and {4 * BATCH}"
                ):
                    loader.state_dict(wrong)


def test_settings_that_mask_the_loss_or_divide_documents_hold(tmp_path: Path) -> None:
    settings = {"reset_position_ids": True, "reset_attention_mask": True}
    with opened(with_ends(Workspace.make(tmp_path), code=1) | settings) as loader:
        batch = next(loader)
    assert sorted(batch) == ["document_lengths", "input_ids", "labels", "loss_mask", "position_ids"]
    for ids, mask, positions, lengths in zip(
        batch["input_ids"], batch["loss_mask"], batch["position_ids"], batch["document_lengths"], strict=True
    ):
        ends = np.flatnonzero(ids == 0)
        assert [*np.flatnonzero(mask == 0)] == [*ends]
        assert np.flatnonzero(positions == 0).tolist() == [0, *(end + 1 for end in ends if end + 1 < LENGTH)]
        assert np.cumsum(lengths).tolist() == [*(end + 1 for end in ends if end + 1 < LENGTH), LENGTH]
    assert (batch["input_ids"] == 0).any()


@pytest.mark.parametrize("workers", [0, 2])
def test_megatrons_provider_gives_samples_by_number(tmp_path: Path, workers: int) -> None:
    workspace = Workspace.make(tmp_path)
    data = with_ends(workspace, web=3, code=1)
    with opened(data) as loader:
        batches = [next(loader) for _ in range(4)]
        provider = loader.megatron_provider()
        assert provider.is_distributed
        train, validation, test = provider([4 * BATCH, 0, 0])
        assert (len(train), validation, test) == (4 * BATCH, None, None)
        order = [range(at, at + 4) for at in range(BATCH, 4 * BATCH, 4)]  # from 12 consumed samples on
        found = [*torch.utils.data.DataLoader(train, batch_sampler=order, num_workers=workers)]
    for name, own in (("tokens", "input_ids"), ("labels", "labels"), ("loss_mask", "loss_mask")):
        expected = np.concatenate([each[own] for each in batches[1:]])
        assert torch.cat([each[name] for each in found]).tolist() == expected.tolist()
    assert found[0]["position_ids"].tolist() == [list(range(LENGTH))] * 4
    assert train[None]["loss_mask"].sum() == 0
    with opened(text(workspace)) as streams, pytest.raises(ConfigError, match="samples of text have no numbers"):
        streams.megatron_provider()([8, 0, 0])[0][0]


# Histories


def plain(data: dict[str, Any], ranks: int) -> Any:
    return Ranks(data, ranks)


class OfTorch:
    """A `DataLoader` over the loader, in this process or in a worker, whose state is the parent's."""

    def __init__(self, data: dict[str, Any], workers: int) -> None:
        self._loader, self._workers = opened(data), workers
        self._batches: Any = None
        self._done = 0

    def batch(self) -> list[list[int]]:
        if self._batches is None:
            dataset = self._loader.as_torch()
            self._batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=self._workers))
            self._done = self._loader.position
        self._done += BATCH
        return next(self._batches)["input_ids"].tolist()

    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps(self._loader.state_dict(self._done)))

    def load(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._done = self._loader.position

    def close(self) -> None:
        self._batches = None
        self._loader.close()


class OfTrainer:
    """Samples in batches that are fetched ahead of the steps; the state is that of the steps."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._loader = opened(data)
        self._trainer: TrainerLike | None = None

    def batch(self) -> list[list[int]]:
        self._trainer = self._trainer or TrainerLike(self._loader)
        return self._trainer.step()

    def state(self) -> dict[str, Any]:
        if self._trainer is None:
            return self._loader.state_dict()
        return json.loads(json.dumps(self._trainer.save()["attributes"]["samples"]))

    def load(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        self._trainer = None
        self._loader.close()


class OfMegatron:
    """Samples by number; what was consumed is the program's own number."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._loader, self._consumed = opened(data), 0

    def batch(self) -> list[list[int]]:
        samples = self._loader.megatron_provider()([self._consumed + BATCH])[0]
        first, self._consumed = self._consumed, self._consumed + BATCH
        return [samples[k]["tokens"].tolist() for k in range(first, first + BATCH)]

    def state(self) -> dict[str, Any]:
        return json.loads(json.dumps(self._loader.state_dict(self._consumed)))

    def load(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._consumed = self._loader.position

    def close(self) -> None:
        self._loader.close()


def forms(choose: random.Random, *, of_text: bool) -> Callable[[dict[str, Any]], Any]:
    """A form, in a number of ranks or workers that it may have."""
    kinds: list[Callable[[dict[str, Any]], Any]] = [
        lambda data: plain(data, choose.choice([1, 2, 3, 4, 6])),
        lambda data: OfTorch(data, workers=0),
        OfTrainer,
    ]
    if not of_text:
        kinds += [OfMegatron, lambda data: OfTorch(data, workers=1)]
    return choose.choice(kinds)


def raw_windows(folder: Path, files: list[str]) -> dict[bytes, int]:
    """The windows of a data set, from the bytes of its shards alone."""
    tokens = np.concatenate([np.fromfile(folder / "data" / f"{name}.bin", np.uint16) for name in files])
    starts = range(0, len(tokens) - LENGTH, LENGTH)
    found = {tokens[at : at + LENGTH].astype(np.int64).tobytes(): at for at in starts}
    assert len(found) == len(starts)
    return found


def history(choose: random.Random, data: list[dict[str, Any]], *, of_text: bool) -> tuple[list[list[Any]], Any]:
    """Batches as they count at the end, in legs of any form; each leg ends by a kill that loses some of them. A later
    leg may have another mixture of `data`."""
    kept: list[list[Any]] = []
    state, ledger = None, {}
    for leg in range(choose.randint(2, 4)):
        form = forms(choose, of_text=of_text)(choose.choice(data))
        if state is not None:
            form.load(state)
        kept += [form.batch() for _ in range(choose.randint(1, 3))]
        state = form.state()
        assert len(json.dumps(state)) <= 16_384
        assert state["consumed_samples"] == len(kept) * BATCH, leg
        ledger = state["counts"]
        for _ in range(choose.randint(0, 2)):
            form.batch()
        form.close()
    return kept, ledger


def of_shards(seed: int, folder: Path, mixtures: list[dict[str, Any]], windows: dict[str, dict[bytes, int]]) -> None:
    """Every sample is a window of a raw file, none comes twice in an epoch, and as many as the ledger says."""
    kept, ledger = history(random.Random(seed), mixtures, of_text=False)
    found: dict[str, Counter[int]] = {name: Counter() for name in windows}
    for batch in kept:
        for row in batch:
            key = np.array(row, np.int64).tobytes()
            (name,) = [name for name, of in windows.items() if key in of]
            found[name][windows[name][key]] += 1
    for name, counts in found.items():
        assert counts.total() == ledger.get(name, 0), (seed, name)
        epochs, rest = divmod(counts.total(), len(windows[name]))
        assert sum(count == epochs + 1 for count in counts.values()) == rest, (seed, name)
        assert sum(count == epochs for count in counts.values()) in (len(windows[name]) - rest, 0), (seed, name)


def of_text(seed: int, data: dict[str, Any], whole: list[list[list[int]]], tokenizer: Tokenizer) -> None:
    """The batches are those of a loader that nobody disturbs, and no row of the files begins twice."""
    kept, _ = history(random.Random(seed), [data], of_text=True)
    assert [sorted(batch) for batch in kept] == [sorted(batch) for batch in whole[: len(kept)]], seed
    rows = [tokenizer.decode(row, skip_special_tokens=False) for batch in kept for row in batch]
    begun = Counter(re.findall(r"<(\d{5})>", " ".join(rows)))
    assert begun, rows[:2]
    assert max(begun.values()) == 1, seed


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], None]:
    folder = tmp_path_factory.mktemp("histories")
    workspace = Workspace.make(folder)
    mixtures = [shards(workspace, **weights) for weights in ({"web": 3, "code": 1}, {"web": 1, "code": 2}, {"code": 1})]
    windows = {"web": raw_windows(folder, ["shard0", "shard1"]), "code": raw_windows(folder, ["shard2"])}
    streams = text(workspace)
    tokenizer = Tokenizer.from_file(str(folder / "bytes" / "tokenizer.json"))
    with opened(streams) as loader:
        whole = [batch["input_ids"].tolist() for batch in islice(loader, 12)]

    def check(seed: int) -> None:
        if seed % 4:
            of_shards(seed, folder, mixtures, windows)
        else:
            of_text(seed, streams, whole, tokenizer)

    return check


@pytest.mark.parametrize("seed", range(6))
def test_a_random_history_reads_the_raw_files_once(seed: int, histories: Callable[[int], None]) -> None:
    histories(seed)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_histories(histories: Callable[[int], None]) -> None:
    for seed in range(1000, 1200):
        histories(seed)
