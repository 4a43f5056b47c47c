"""What a submit refuses of changed data, what it says, and what acceptance does."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import InputError
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture.data_change import AcceptedData, apply_data_change
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter
from tests.workspace import Workspace


def shard(prefix: Path, lengths: list[int]) -> None:
    writer = ShardWriter(prefix, np.uint16)
    text = np.random.default_rng(zlib.crc32(f"{prefix.parent.name}/{prefix.name}".encode()))  # each another one
    writer.add(text.integers(0, 300, sum(lengths)), lengths)
    writer.finish()


class Data:
    """Folders a, b, c of two shards each, and the run as its submits left it."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace.make(folder)
        self.folder = folder
        for number, name in enumerate("abc"):
            for part in range(2):
                shard(folder / name / f"s{part}", [100, 200 + number, 50 + part])
        self.manifest: Manifest | None = None
        self.history: list[RunConfig] = []

    def config(self, names: str = "ab", *, training: dict[str, Any] | None = None, **data: Any) -> RunConfig:
        mixture = {name: {"path": str(self.folder / name), "weight": 1 + i} for i, name in enumerate(names)}
        sections = {
            "data": {"tokenizer": str(self.folder / "tokenizer.json"), "datasets": [], "mixture": mixture} | data
        }
        return resolve.load_run_config(self.workspace.config("run", training=training or {}, **sections))

    def submit(self, config: RunConfig, *, accept: bool = False, trained: bool = True) -> AcceptedData:
        found = build_manifest(config)
        if self.manifest is None:
            self.manifest, self.history = found, [config]
            return AcceptedData(config=config, manifest=found, notes=[])
        evolved = apply_data_change(
            frozen=self.manifest, history=self.history, found=found, config=config, accept=accept, trained=trained
        )
        self.manifest, self.history = evolved.manifest, [evolved.config, *self.history]
        return evolved


@pytest.fixture
def data(tmp_path: Path) -> Data:
    made = Data(tmp_path)
    made.submit(made.config())
    return made


def test_a_new_mixture_is_taken_and_datasets_that_left_are_kept(data: Data) -> None:
    assert list(data.submit(data.config("cb")).manifest.datasets) == ["a", "b", "c"]
    again = data.submit(data.config("abc"))
    assert again.notes == []
    assert [source.edition for source in again.config.data.sources.values()] == [1, 1, 1]


def test_a_moved_folder_is_taken(data: Data) -> None:
    shutil.move(data.folder / "a", data.folder / "moved")
    config = data.config(mixture={"a": {"path": str(data.folder / "moved"), "weight": 1}})
    evolved = data.submit(config)
    assert evolved.notes == []
    assert evolved.manifest.datasets["a"].shards[0].prefix == str(data.folder / "moved" / "s0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: shard(folder / "s2", [10]), "a: shard s2 was added"),
        (lambda folder: [(folder / f"s1{suffix}").unlink() for suffix in (".bin", ".idx")], "a: shard s1 is gone"),
        (
            lambda folder: shard(folder / "s0", [100, 200, 50, 7]),
            "a: shard s0 had 3 documents, 350 tokens, now 4 documents, 357 tokens",
        ),
        (lambda folder: shard(folder / "s0", [200, 100, 50]), "in another order or of other lengths"),
    ],
)
def test_other_files_are_refused_by_name_and_accepted_as_a_new_edition(data: Data, change: Any, said: str) -> None:
    before = data.manifest
    change(data.folder / "a")
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        data.submit(data.config())
    assert "--accept-data-change" in str(caught.value)
    assert "b:" not in str(caught.value)
    evolved = data.submit(data.config(), accept=True)
    assert said in "\n".join(evolved.notes)
    assert list(evolved.manifest.datasets) == ["a", "b", "a@2"]
    assert before is not None
    assert evolved.manifest.datasets["a"] == before.datasets["a"]
    assert {name: source.edition for name, source in evolved.config.data.sources.items()} == {"a": 2, "b": 1}
    assert data.submit(data.config()).notes == []  # the same files once more: nothing to accept


def test_shards_in_another_order_are_refused(data: Data) -> None:
    for suffix in (".bin", ".idx"):
        (data.folder / "a" / f"s0{suffix}").rename(data.folder / "a" / f"s9{suffix}")
    with pytest.raises(InputError, match="shard s0 is gone\n  a: shard s9 was added"):
        data.submit(data.config())


def test_with_a_split_other_files_cannot_be_accepted(tmp_path: Path) -> None:
    """Their end would be held out, and may have been trained on."""
    data = Data(tmp_path)
    data.submit(data.config(split=0.1))
    for suffix in (".bin", ".idx"):
        (data.folder / "a" / f"s1{suffix}").unlink()
    with pytest.raises(InputError, match="a: shard s1 is gone"):
        data.submit(data.config(split=0.1))
    with pytest.raises(InputError, match=r"a: these files .* may have been trained on"):
        data.submit(data.config(split=0.1), accept=True)


def test_files_that_are_back_go_on_in_their_own_edition(data: Data) -> None:
    shutil.copytree(data.folder / "a", data.folder / "kept")
    shard(data.folder / "a" / "s2", [10])
    data.submit(data.config(), accept=True)
    shutil.rmtree(data.folder / "a")
    shutil.move(data.folder / "kept", data.folder / "a")
    with pytest.raises(InputError, match="a: has the files of its edition 1 again"):
        data.submit(data.config())
    assert data.submit(data.config(), accept=True).config.data.sources["a"].edition == 1


def test_a_new_name_for_known_files_is_refused(data: Data) -> None:
    config = data.config(mixture={"new": {"path": str(data.folder / "a"), "weight": 1}})
    with pytest.raises(InputError, match=r"new: has the files of 'a'.*its windows would come again"):
        data.submit(config)
    assert "new" in data.submit(config, accept=True).manifest.datasets


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"seq_length": 32}}, "training.seq_length was 64, is 32: positions are counted"),
        ({"training": {"seed": 5}}, "training.seed was 28, is 5: the running epochs"),
        ({"split": 0.1}, "data.split was 0.0, is 0.1: windows would move"),
    ],
)
def test_what_numbers_the_samples_cannot_change_once_trained(data: Data, changes: Any, said: str) -> None:
    for accept in (False, True):
        with pytest.raises(InputError, match=f"cannot change in a run that has trained.*\n  {re.escape(said)}"):
            data.submit(data.config(**changes), accept=accept)
    with pytest.raises(InputError, match="it has not trained, and would begin anew"):
        data.submit(data.config(**changes), trained=False)
    assert data.submit(data.config(**changes), trained=False, accept=True).notes[0].startswith(said)


def test_another_tokenizer_is_refused(data: Data) -> None:
    file = data.folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"w299"', '"other"'))
    with pytest.raises(InputError, match=r"tokenizer was '\w{12}…', is '\w{12}…': ids would mean other text"):
        data.submit(data.config(), accept=True)


def test_a_tokenizer_that_gives_the_same_ids_is_taken(data: Data) -> None:
    file = data.folder / "tokenizer.json"
    value = json.loads(file.read_text())
    value["decoder"] = {"type": "Fuse"}
    file.write_text(json.dumps(value))
    fingerprint = data.manifest.tokenizer_fingerprint if data.manifest is not None else ""
    assert build_manifest(data.config()).tokenizer_fingerprint != fingerprint
    assert data.submit(data.config()).notes == []
    value["model"]["vocab"]["other"] = value["model"]["vocab"].pop("w299")
    file.write_text(json.dumps(value))
    with pytest.raises(InputError, match="ids would mean other text"):
        data.submit(data.config())


def test_another_order_of_one_data_set_begins_it_anew(data: Data) -> None:
    mixture = {"a": {"path": str(data.folder / "a"), "weight": 1, "order": "document-window"}}
    with pytest.raises(InputError, match=r"a: order and options were .*window.*document-window"):
        data.submit(data.config(mixture=mixture))
    assert data.submit(data.config(mixture=mixture), accept=True).config.data.sources["a"].edition == 2


def test_a_validation_set_may_be_added_but_not_changed_or_trained_on(data: Data) -> None:
    held_out = {"held-out": [str(data.folder / "c")]}
    data.submit(data.config(validation=held_out))
    shard(data.folder / "c" / "s5", [40])
    with pytest.raises(InputError, match="validation 'held-out': shard s5 was added"):
        data.submit(data.config(validation=held_out))
    assert data.submit(data.config(validation=held_out), accept=True).notes
    with pytest.raises(InputError, match=r"training shard\(s\) also stand in validation"):
        data.submit(data.config("b", validation={"seen": [str(data.folder / "a")]}))


def test_one_shard_in_two_data_sets_is_refused(data: Data) -> None:
    mixture = {name: {"path": str(data.folder / "a" / "s0"), "weight": 1} for name in "xy"}
    with pytest.raises(InputError, match="its text also stands in"):
        data.submit(data.config(mixture=mixture), accept=True)


def test_another_window_of_documents_begins_the_data_set_anew(tmp_path: Path) -> None:
    data = Data(tmp_path)
    data.submit(data.config(order="document-window", document_window={"window": 32, "overlap": 2}))
    same = data.submit(data.config(order="document-window", document_window={"overlap": 2, "window": 32}))
    assert same.notes == []
    other = data.config(order="document-window", document_window={"window": 32, "overlap": 3})
    with pytest.raises(InputError, match=r"a: order and options were .*'overlap': 2.*are .*'overlap': 3.* begin anew"):
        data.submit(other)
    assert list(data.submit(other, accept=True).manifest.datasets) == ["a", "b", "a@2", "b@2"]
