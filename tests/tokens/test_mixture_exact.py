"""Mixtures to the document: shards cut by a shorter .idx, numbers of tokens, repeats, and who reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.errors import ConfigError, InputError
from relayrun.tokens.mixture import shard_selection
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.order.datasets import WindowDataset
from relayrun.tokens.shards.checks import verify_shards
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import SUMMARY_JSON, find_prefixes
from relayrun.tokens.shards.shard import Shard, ShardWriter
from tests.shard_records import write_folder_record

SCRIPT = Path(__file__).parents[2] / "scripts" / "tools" / "create_data_mixture.py"
EOD = 99


def dataset(folder: Path, *, shards: int, documents: int = 400, longest: int = 40, seed: int = 0) -> Path:
    """Documents of up to `longest` tokens, some empty; a record of checksums, as tokenization leaves it."""
    generator = np.random.default_rng(seed)
    record = {}
    for number in range(shards):
        writer = ShardWriter(folder / f"{number:05d}_tokens", np.uint16)
        lengths = generator.integers(0, longest, documents)
        ids = generator.integers(0, EOD, lengths.sum())
        ids[np.cumsum(lengths)[lengths > 0] - 1] = EOD
        writer.add(ids, lengths)
        assert writer.finish()
        record[f"{number:05d}_tokens"] = {"xxh3_128": writer.xxh3_128}
    write_folder_record(folder, record)
    return folder


def tokens_of(mixture: Path) -> dict[str, int]:
    return {
        folder.name: sum(Shard.open(prefix).tokens for prefix in find_prefixes([folder]))
        for folder in sorted(mixture.iterdir())
        if folder.is_dir()
    }


def cut_shards(mixture: Path) -> list[str]:
    return [prefix for prefix in find_prefixes([mixture]) if Shard.open(prefix).cut]


def test_weights_hold_to_a_thousandth(tmp_path: Path) -> None:
    folders = [dataset(tmp_path / name, shards=5, documents=3000, seed=i) for i, name in enumerate("abc")]
    weights = [0.5, 0.3, 0.2]
    text = create_mixture(folders, weights, tmp_path / "m")
    found = tokens_of(tmp_path / "m")
    for name, weight in zip("abc", weights, strict=True):
        assert found[name] / sum(found.values()) == pytest.approx(weight, rel=0.001)
    assert "off its weight" not in text
    assert len(cut_shards(tmp_path / "m")) == 2  # a is used up


@pytest.mark.filterwarnings("ignore")  # of torch, while megatron-core imports it
def test_everybody_reads_a_cut_shard(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    a, b = dataset(tmp_path / "a", shards=1), dataset(tmp_path / "b", shards=1, seed=1)
    create_mixture([a, b], [0.75, 0.25], tmp_path / "m")
    (prefix,) = cut_shards(tmp_path / "m")
    cut, whole = Shard.open(prefix), Shard.open(b / "00000_tokens")
    assert os.readlink(prefix + ".bin") == whole.prefix + ".bin"
    assert not os.path.islink(prefix + ".idx")
    assert (tmp_path / "m" / "b").is_dir()
    theirs, original = IndexedDataset(prefix), IndexedDataset(whole.prefix)
    assert (len(theirs), len(theirs.document_indices) - 1) == (cut.sequences, cut.documents)
    assert 0 < cut.documents < whole.documents
    for number in range(len(theirs)):
        assert np.array_equal(theirs[number], original[number])
    windows = WindowDataset(DatasetManifest.build([prefix]), 64)
    assert len(windows) == (cut.tokens - 1) // 64
    stream = np.asarray(whole.ids())[: cut.tokens]
    for number in range(len(windows)):
        assert np.array_equal(windows.read(number), stream[64 * number : 64 * number + 65])
    assert merge_shards([prefix], tmp_path / "merged").tokens == cut.tokens
    assert np.array_equal(Shard.open(tmp_path / "merged").ids(), stream)
    (verified,) = verify_shards([prefix], vocabulary_size=100, eod=EOD)
    assert verified.faults == ()


def test_a_cut_index_that_is_not_the_beginning_of_its_shard_is_a_fault(tmp_path: Path) -> None:
    a, b = dataset(tmp_path / "a", shards=1), dataset(tmp_path / "b", shards=1, seed=1)
    create_mixture([a, b], [0.75, 0.25], tmp_path / "m")
    (prefix,) = cut_shards(tmp_path / "m")
    dataset(tmp_path / "other", shards=1, documents=100, longest=20, seed=5)
    os.replace(tmp_path / "other" / "00000_tokens.idx", prefix + ".idx")
    (verified,) = verify_shards([prefix], eod=EOD)
    assert f"its index is not the beginning of {b}/00000_tokens.idx" in verified.faults
    with open(b / "00000_tokens.bin", "ab") as file:  # a real shard with bytes behind its end is no cut one
        file.write(b"xx")
    (verified,) = verify_shards([str(b / "00000_tokens")], eod=EOD)
    assert any("its index ends at" in fault for fault in verified.faults)


def test_a_number_of_tokens_is_met_and_repeats_what_is_too_small(tmp_path: Path) -> None:
    a, b = dataset(tmp_path / "a", shards=3), dataset(tmp_path / "b", shards=3, seed=1)
    have = sum(Shard.open(prefix).tokens for prefix in find_prefixes([b]))
    text = create_mixture([a, b], [0.2, 0.8], tmp_path / "m", tokens=3 * have)
    found = tokens_of(tmp_path / "m")
    assert sum(found.values()) == pytest.approx(3 * have, rel=0.001)
    assert found["b"] / sum(found.values()) == pytest.approx(0.8, rel=0.001)
    assert "b is repeated: 2.40 times all its tokens" in text
    summary = json.loads((tmp_path / "m" / SUMMARY_JSON).read_text())
    assert [entry["epochs"] for entry in summary["datasets"]] == pytest.approx([0.6, 2.4], rel=0.05)
    assert summary["datasets"][1]["exhausted_after_tokens"] == round(have / 0.8)
    assert sorted(path.name for path in (tmp_path / "m" / "b").iterdir() if path.is_dir()) == ["epoch-2", "epoch-3"]
    assert len(list((tmp_path / "m" / "b" / "epoch-2").glob("*.bin"))) == 3
    few = create_mixture([a, b], [0.2, 0.8], tmp_path / "m", tokens=have // 2)
    assert "repeated" not in few
    assert sum(tokens_of(tmp_path / "m").values()) == pytest.approx(have / 2, rel=0.005)


def test_repeats_are_trained_on_where_a_mixture_asked_for_them_and_refused_elsewhere(tmp_path: Path) -> None:
    a, b = dataset(tmp_path / "a", shards=2), dataset(tmp_path / "b", shards=2, seed=1)
    text = create_mixture([a, b], [0.8, 0.2], tmp_path / "m", allow_repeats=True)
    assert "b is used up" in text
    assert "a is repeated: 4" in text or "a is repeated: 3.9" in text
    mixture = {"m": find_prefixes([tmp_path / "m"])}
    manifest = Manifest.build(mixture, {}, vocabulary_size=100, eod=EOD, tokenizer="t")
    assert manifest.datasets["m"].tokens == sum(tokens_of(tmp_path / "m").values())
    repeated = tmp_path / "m" / "a" / "epoch-2"
    os.rename(repeated, tmp_path / "m" / "a" / "epoch-9")  # not in the summary
    twice = {"m": find_prefixes([tmp_path / "m"])}
    with pytest.raises(InputError, match="its text also stands in"):
        Manifest.build(twice, {}, vocabulary_size=100, eod=EOD, tokenizer="t")


def test_a_mixture_of_a_mixture_does_not_hang_on_its_index(tmp_path: Path) -> None:
    a, b = dataset(tmp_path / "a", shards=1), dataset(tmp_path / "b", shards=1, seed=1)
    create_mixture([a, b], [0.75, 0.25], tmp_path / "m")
    create_mixture([tmp_path / "m"], [1], tmp_path / "n")
    (prefix,) = cut_shards(tmp_path / "n")
    before = Path(prefix + ".idx").read_bytes()
    assert not os.path.islink(prefix + ".idx")
    create_mixture([a, b], [0.5, 0.5], tmp_path / "m")  # replaces the folder with the cut index
    assert Path(prefix + ".idx").read_bytes() == before
    create_mixture([tmp_path / "m"], [1], tmp_path / "n")  # and n is still known as a mixture


def test_a_document_that_is_too_long_is_named(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", shards=1, documents=10, longest=1000)
    b = dataset(tmp_path / "b", shards=1, documents=10, longest=1000, seed=1)
    text = create_mixture([a, b], [0.7, 0.3], tmp_path / "m")
    assert "off its weight: a document at the cut has" in text


def test_what_cannot_be_asked_for_is_one_error(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", shards=1)
    with pytest.raises(ConfigError, match="less than half of its first document"):
        create_mixture([a], [1], tmp_path / "m", tokens=1)
    with pytest.raises(ConfigError, match=r"would be all of them [\d,]+ times; 100 is the most"):
        create_mixture([a], [1], tmp_path / "m", tokens=10**14)
    with pytest.raises(ConfigError, match="shards would be linked, because a small dataset is repeated often"):
        create_mixture([a], [1], tmp_path / "m", tokens=10**14, most_repeats=10**15)
    for text in ("0", "-5", "10X", "", "1e9"):
        with pytest.raises(ConfigError, match="no number of tokens"):
            shard_selection.parse_token_count(text)
    assert [shard_selection.parse_token_count(text) for text in ("7", "1_000", "20k", "300M", "10B", "1.5T")] == [
        7,
        1000,
        20_000,
        300_000_000,
        10_000_000_000,
        1_500_000_000_000,
    ]
    assert not (tmp_path / "m").exists()


def tiny(folder: Path, *lengths: int) -> Path:
    writer = ShardWriter(folder / "s", np.uint16)
    writer.add(np.ones(sum(lengths), np.uint16), list(lengths))
    assert writer.finish()
    return folder


def refusal(*arguments: Any, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        create_mixture(*arguments, dry_run=True, **options)
    return caught.value


def test_a_tiny_dataset_that_ends_a_mixture_is_named_and_each_advice_helps(tmp_path: Path) -> None:
    big, small = tiny(tmp_path / "big", *[1000] * 200), tiny(tmp_path / "small", 20)
    error = refusal([big, small], [0.5, 0.5], tmp_path / "m")
    assert error.message == (
        "20 tokens, its share (50 % of 40 tokens), are less than half of its first document, which has 1,000; "
        "the mixture ends there, where small with 20 tokens is used up"
    )
    assert error.where == str(big)
    assert error.hint == (
        "give small about 3.8 % of the weights or less, or leave it out; "
        "or ask for --tokens 1002 or more, which read small 25.1 times"
    )
    create_mixture([big, small], [0.962, 0.038], tmp_path / "m", dry_run=True)
    create_mixture([big], [1], tmp_path / "m", dry_run=True)
    assert "small is repeated: 25.00 times" in create_mixture([big, small], [1, 1], tmp_path / "m", tokens=1002)
    assert "tokens" not in (refusal([big, small], [0.5, 0.5], tmp_path / "n", most_repeats=20).hint or "")


def test_a_weight_that_is_too_small_is_named_and_each_advice_helps(tmp_path: Path) -> None:
    big, small = tiny(tmp_path / "big", *[1000] * 200), tiny(tmp_path / "small", *[50] * 100)
    error = refusal([big, small], [1, 1e-6], tmp_path / "m")
    assert error.message == (
        "0 tokens, its share (0.0001 % of 200,000 tokens), are less than half of its first document, which has 50"
    )
    assert error.hint == "give it about 0.013 % of the weights or more, or leave it out"
    create_mixture([big, small], [1, 0.00014], tmp_path / "m", dry_run=True)
    error = refusal([big, small], [0.99, 0.01], tmp_path / "m", tokens=2000)
    assert error.hint == "give it about 1.3 % of the weights or more, or leave it out; or ask for --tokens 2600 or more"
    create_mixture([big, small], [0.987, 0.013], tmp_path / "m", tokens=2000, dry_run=True)
    create_mixture([big, small], [0.99, 0.01], tmp_path / "m", tokens=2600, dry_run=True)
    error = refusal([big, small], [0.9, 0.1], tmp_path / "m", tokens=200)
    assert error.hint == "leave it out; or ask for --tokens 557 or more"
    create_mixture([big, small], [0.9, 0.1], tmp_path / "m", tokens=557, dry_run=True)


def test_a_dataset_is_not_repeated_thousands_of_times_by_mistake(tmp_path: Path) -> None:
    big, small = tiny(tmp_path / "big", *[1000] * 200), tiny(tmp_path / "small", 20)
    error = refusal([big, small], [0.5, 0.5], tmp_path / "m", allow_repeats=True)
    assert error.message == (
        "this dataset has 20 tokens, and 200,000, its share, would be all of them 10,000 times; 100 is the most"
    )
    assert error.where == str(small)
    assert error.hint is not None
    assert error.hint.startswith("give it about 0.50 % of the weights or less, leave it out")
    assert error.hint.endswith("--most-repeats 10000")
    create_mixture([big, small], [0.995, 0.005], tmp_path / "m", allow_repeats=True, dry_run=True)
    create_mixture([big, small], [1, 1], tmp_path / "m", allow_repeats=True, most_repeats=10_000, dry_run=True)
    refusal([big, small], [0.5, 0.5], tmp_path / "m", tokens=10_000)


@pytest.mark.slow
def test_the_door_forecasts_without_writing(tmp_path: Path) -> None:
    for i, name in enumerate("ab"):
        dataset(tmp_path / name, shards=2, seed=i)
    command = [sys.executable, str(SCRIPT), "--folders", "a", "b", "--weights", "3", "1", "--output", "m"]
    dry = subprocess.run(
        [*command, "--tokens", "20k", "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert not (tmp_path / "m").exists()
    done = subprocess.run(
        [*command, "--tokens", "20k"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout == dry.stdout
    assert "epochs" in dry.stdout.splitlines()[0]
    assert sum(tokens_of(tmp_path / "m").values()) == pytest.approx(20_000, rel=0.002)


@pytest.mark.alone
@pytest.mark.long
def test_a_hundred_thousand_shards_take_seconds(tmp_path: Path) -> None:
    first = [dataset(tmp_path / name / "0", shards=1, seed=i) / "00000_tokens" for i, name in enumerate("ab")]
    for prefix, name in zip(first, "ab", strict=True):
        rest = Path(f"{prefix}.bin").read_bytes()[5:]
        for number in range(50_000):
            if number % 1000 == 0:
                (folder := tmp_path / name / f"dump-{number}").mkdir()
            Path(f"{folder}/{number}.bin").write_bytes(name.encode() + number.to_bytes(4) + rest)
            os.link(f"{prefix}.idx", f"{folder}/{number}.idx")
    started, cpu = time.monotonic(), time.process_time()
    create_mixture([tmp_path / "a", tmp_path / "b"], [0.5, 0.5], tmp_path / "m")
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    print(f"100,000 shards: {seconds:.1f} s, {cpu:.1f} s of CPU")
    found = tokens_of(tmp_path / "m")
    assert found["a"] == pytest.approx(found["b"], rel=0.001)
    assert cpu < 60
