"""Text that is held out is not trained on, under whatever path, copy, merge, cut or repeat it lies."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.data import DataSection, DataSource
from relayrun.errors import InputError
from relayrun.submit import submission
from relayrun.submit.megatron_lm import command_line
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import expand_paths
from relayrun.tokens.shards.shard import ShardWriter, TokenizerRecord
from relayrun.tokens.streams import files
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.tokenization_corpus import TEXTS, shard_documents, train_tokenizer
from tests.workspace import Workspace

MADE = TokenizerRecord(fingerprint="f" * 64, ids="", size=None, eos=None)


def shard(prefix: Path, seed: int, lengths: tuple[int, ...] = (60, 70), *, record: bool = False) -> str:
    writer = ShardWriter(prefix, np.uint16, own_record=MADE if record else None)
    writer.add(np.random.default_rng(seed).integers(1, 300, sum(lengths)), lengths)
    writer.finish()
    return str(prefix)


def build(train: Any, *, split: float = 0.0, **validation: str) -> Manifest:
    datasets = train if isinstance(train, dict) else {"train": expand_paths([str(train)])}
    held = {name: expand_paths([path]) for name, path in validation.items()}
    return Manifest.build(datasets, held, vocabulary_size=500, eod=3, tokenizer="none", split=split)


def refused(train: Any, held: Path | str) -> bool:
    """Whether this validation set is refused; what is refused names both."""
    try:
        build(train, v=str(held))
    except InputError as error:
        found = error.message
        assert "also stand in validation 'v'" in found
        return os.path.dirname(expand_paths([str(held)])[0]) in found
    return False


@pytest.mark.parametrize("record", [True, False])
def test_a_copy_of_a_training_shard_is_refused(tmp_path: Path, record: bool) -> None:
    for number in range(2):
        shard(tmp_path / "t" / f"s{number}", number, record=record)
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    (tmp_path / "one").mkdir()
    for suffix in (".bin", ".idx"):  # of a shard with a record: without it
        shutil.copy(tmp_path / "t" / f"s1{suffix}", tmp_path / "one" / f"renamed{suffix}")
    assert refused(tmp_path / "t", tmp_path / "copy")
    assert refused(tmp_path / "t", tmp_path / "one")
    assert refused(tmp_path / "one", tmp_path / "t")
    # other text in documents of the same lengths is other text, and an empty shard is none
    shard(tmp_path / "other", 7, record=record)
    for name in ("empty", "void"):
        shard(tmp_path / name, 0, (0,), record=record)
    assert not refused(tmp_path / "t", tmp_path / "other")
    build({"train": [tmp_path / "t" / "s0", tmp_path / "void"]}, v=str(tmp_path / "empty"))


def test_a_merge_of_training_shards_is_refused_and_so_is_its_part(tmp_path: Path) -> None:
    parts = [shard(tmp_path / "t" / f"s{number}", number, record=True) for number in range(2)]
    parts.append(shard(tmp_path / "t" / "foreign", 2))
    merge_shards(parts, tmp_path / "m" / "merged")
    merge_shards([str(tmp_path / "m" / "merged"), shard(tmp_path / "x", 9)], tmp_path / "twice" / "merged")
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    for held in ("m", "copy", "twice"):
        assert refused(tmp_path / "t", tmp_path / held)
        assert refused(tmp_path / held, tmp_path / "t")
        assert refused({"train": [parts[2]]}, tmp_path / held)
    assert refused(tmp_path / "m", tmp_path / "twice")
    assert not refused(tmp_path / "m", shard(tmp_path / "apart", 11, record=True))
    (tmp_path / "t").rename(tmp_path / "away")  # what was merged is known although it lies elsewhere now
    assert refused(tmp_path / "away" / "s0", tmp_path / "twice")


@pytest.mark.parametrize("record", [True, False])
def test_a_copy_of_a_part_that_a_mixture_cut_is_refused(tmp_path: Path, record: bool) -> None:
    """A mixture cuts a shard by a shorter .idx; a copy that follows its links has that beside the whole .bin."""
    for number, name in enumerate(("web", "code")):
        shard(tmp_path / name / name, number, tuple(range(20, 60)), record=record)
    create_mixture([tmp_path / "web", tmp_path / "code"], [0.5, 0.5], tmp_path / "mixture", tokens=1000)
    shutil.copytree(tmp_path / "mixture", tmp_path / "copy")
    cut = tmp_path / "copy" / "web" / "web.idx"
    assert cut.stat().st_size < (tmp_path / "web" / "web.idx").stat().st_size
    assert refused(tmp_path / "web", tmp_path / "copy" / "web")
    assert not refused(tmp_path / "code", tmp_path / "copy" / "web")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tokenizer.json`, and `text` as `one` and `two` shards in folders of these names."""
    folder = tmp_path_factory.mktemp("raw")
    train_tokenizer(folder / "tokenizer.json")
    (folder / "text").mkdir()
    for number in range(2):
        lines = "".join(json.dumps({"text": f"{number} {text}"}) + "\n" for text in TEXTS * 5)
        (folder / "text" / f"{number}.jsonl").write_text(lines)
    (folder / "text" / "empty.jsonl").touch()
    (folder / "other").mkdir()
    (folder / "other" / "empty.jsonl").touch()
    (folder / "other" / "0.jsonl").write_text(json.dumps({"text": "something else " * 30}) + "\n")
    for name, tasks, paths in (("one", 1, "text/0.jsonl text/1.jsonl text/empty.jsonl"), ("two", 2, "text/1.jsonl")):
        (folder / f"{name}.paths").write_text("\n".join(paths.split()) + "\n")
        options = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"), workers=1, tasks=tasks)
        tokenize_paths_file(options, output_folder=folder / name, dataset=folder, paths_file=folder / f"{name}.paths")
    return folder


def stream(path: Path) -> dict[str, DatasetManifest]:
    source = DataSource.model_validate({"path": str(path), "weight": 1.0, "source": "jsonl"})
    return {"web": files.freeze_text_files("web", source, 1)}


def test_shards_of_the_raw_files_of_training_are_refused(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(raw / "one", raw / "two")  # tokenized twice, from files in common
    assert refused(raw / "two", raw / "one")
    assert refused(stream(raw / "text"), raw / "two")
    assert refused(stream(raw / "text" / "1.jsonl"), raw / "one")
    assert not refused(stream(raw / "text" / "0.jsonl"), raw / "two")
    assert not refused(stream(raw / "other"), raw / "one")  # no text in common, though both have an empty file
    shutil.copytree(raw / "text", tmp_path / "copy")
    assert refused(stream(tmp_path / "copy"), raw / "one")
    merge_shards([str(raw / "two" / "00000_tokens")], tmp_path / "merged")
    assert refused(stream(raw / "text"), tmp_path / "merged")
    monkeypatch.setattr(files, "MAX_HASHED_BYTES", 0)  # no file of the stream is read whole
    (tmp_path / "link").symlink_to(raw / "text")
    assert refused(stream(tmp_path / "link"), raw / "two")


def test_files_without_text_are_nothing_in_common(raw: Path, tmp_path: Path) -> None:
    """Spark writes a file without rows wherever a part has none, and all of them are the same bytes."""
    dataset = tmp_path / "dataset"
    for number in range(2):
        (dataset / f"{number}").mkdir(parents=True)
        shutil.copyfile(raw / "text" / f"{number}.jsonl", dataset / f"{number}" / "text.jsonl")
        (dataset / f"{number}" / "void.jsonl.gz").write_bytes(gzip.compress(b"", mtime=0))
        (tmp_path / "paths").write_text(f"{number}/text.jsonl\n{number}/void.jsonl.gz\n")
        options = TokenizeOptions(tokenizer=str(raw / "tokenizer.json"), workers=1, tasks=1)
        tokenize_paths_file(
            options, output_folder=tmp_path / f"t{number}", dataset=dataset, paths_file=tmp_path / "paths"
        )
    assert not refused(tmp_path / "t0", tmp_path / "t1")
    assert refused(tmp_path / "t0", raw / "one")


def test_a_raw_file_below_a_url_of_a_folder_is_that_of_the_folder(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "paths").write_text("text/1.jsonl\n")
    options = TokenizeOptions(tokenizer=str(raw / "tokenizer.json"), workers=1, tasks=1)
    tokenize_paths_file(options, output_folder=tmp_path / "url", dataset=f"file://{raw}", paths_file=tmp_path / "paths")
    assert refused(raw / "two", tmp_path / "url")
    assert refused(tmp_path / "url", raw / "one")


def test_a_submit_refuses_a_copy(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    (tmp_path / "copy").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / "data" / f"shard2{suffix}", tmp_path / "copy" / f"x{suffix}")
    file = workspace.config("run", data={"validation": {"held": [str(tmp_path / "copy")]}})
    with pytest.raises(InputError, match=r"shard2: 1 training shard.* also stand in validation 'held'"):
        submission.submit_run(resolve.load_run_config(file))
    assert not (tmp_path / "run").exists()


def test_megatron_lm_is_given_no_copy_either(tmp_path: Path) -> None:
    shard(tmp_path / "t" / "s", 1)
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    values = {"tokenizer": "none", "datasets": [str(tmp_path / "t")], "validation": {"held": [str(tmp_path / "copy")]}}
    with pytest.raises(InputError, match="also stand in validation 'held'"):
        command_line.data_path_flags(DataSection.model_validate(values))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A mixture in which `code` comes twice and a part of it a third time, of shards without a record."""
    for name, count in (("web", 3), ("code", 2)):
        for number in range(count):
            shard(tmp_path / name / f"{name}{number}", number + 10 * count, tuple(range(20, 60)))
    create_mixture([tmp_path / "web", tmp_path / "code"], [0.3, 0.7], tmp_path / "mixture", allow_repeats=True)
    assert any("epoch-2" in prefix for prefix in expand_paths([str(tmp_path / "mixture")]))
    return tmp_path


@pytest.mark.parametrize("split", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_a_split_holds_out_documents_of_all_passes_together(mixed: Path, split: float) -> None:
    """Passes over a data set and the part of a last one read the same documents: by their first tokens."""
    shards = build(mixed / "mixture", split=split).datasets["train"]
    assert {shard.pass_of for shard in shards.shards} > {None}
    held_out = WindowOrder(shards, seq_length=4, seed=1, split=split, held_out=True)
    training = WindowOrder(shards, seq_length=4, seed=1, split=split)
    sides = []
    for side in (training, held_out):
        places = {(each.prefix, each.document) for i in range(len(side)) for each in side.origins(0, i)}
        texts = {prefix: [tuple(text) for text in shard_documents(Path(prefix))] for prefix, _ in places}
        sides.append({texts[prefix][document] for prefix, document in places})
    assert min(map(len, sides)) > 0
    assert not sides[0] & sides[1]


def test_a_share_of_text_that_is_repeated_otherwise_cannot_be_held_out(mixed: Path) -> None:
    """In a merge of passes, and in passes that are data sets of their own."""
    prefixes = expand_paths([str(mixed / "mixture")])
    merge_shards(prefixes, mixed / "merged")
    apart = {f"{again}": [each for each in prefixes if ("epoch-" in each) == again] for again in (False, True)}
    for train in (mixed / "merged", apart):
        build(train)
        with pytest.raises(InputError, match=r"data\.split would hold out text that is trained on") as caught:
            build(train, split=0.1)
        assert "data.validation" in str(caught.value)
    build(mixed / "web", split=0.1)


def test_megatron_lm_is_refused_a_split_of_a_mixture_with_repeats(tmp_path: Path) -> None:
    """It would hold out the last documents of the last pass alone."""
    workspace = Workspace.make(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.move(tmp_path / "data" / f"shard2{suffix}", small)
    create_mixture([tmp_path / "data", small], [0.3, 0.7], tmp_path / "mixture", allow_repeats=True)
    data = {"datasets": [str(tmp_path / "mixture")]}
    config = resolve.load_run_config(workspace.config("run", data=data | {"split": 0.1}))
    assert isinstance(config, RunConfig)
    with pytest.raises(InputError, match=r"data\.split would hold out text"):
        command_line.data_path_flags(config.data)
    submission.submit_run(config)
    assert (tmp_path / "run").exists()
