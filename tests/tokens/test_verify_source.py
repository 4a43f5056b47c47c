"""Shards against the files that they were made from, and what a rerun makes of what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from relayrun.errors import InputError
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import DumpsFolder
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.verify import SourceComparison, compare_with_source, verify_dumps
from tests.tokenization_corpus import TEXTS, write_parquet
from tests.tokens.test_dumps_status import settings
from tests.tokens.test_preprocess import Run, data, out, run, tokenizer, write_jsonl

__all__ = ["data", "out", "run", "settings", "tokenizer"]

ROOT = Path(__file__).resolve().parents[2]


def wrong_id(out: Path, name: str, place: int) -> None:
    """Put another id into a shard, and its checksum into the record: as an engine that was wrong would have left it."""
    file, record = out / f"{name}.bin", json.loads((out / "tokenization.json").read_text())
    ids = np.fromfile(file, np.uint16)
    ids[place] = ids[place] % 100 + 3
    ids.tofile(file)
    record["shards"][name]["xxh3_128"]["bin"] = xxhash.xxh3_128_hexdigest(file.read_bytes())
    (out / "tokenization.json").write_text(json.dumps(record))


def one(prefix: Path, **options: object) -> SourceComparison:
    (found,) = compare_with_source([str(prefix)], workers=1, **options)  # type: ignore[arg-type]
    return found


MANY = ["", *TEXTS, "", *(f"{text} again" for text in TEXTS)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"keep_empty": True, "append_eod": "no"}], ids=["usual", "empty kept"])
def test_a_wrong_id_is_found_by_the_source_and_a_rerun_mends_it(
    run: Run, data: Path, out: Path, options: dict[str, object]
) -> None:
    write_parquet(data / "a.parquet", ["before", None, "it"])
    write_jsonl(data / "b.jsonl", MANY)
    names = ["a.parquet", "b.jsonl"]
    run(names, tasks=1, **options)
    shard = out / "00000_tokens"
    good = (out / "00000_tokens.bin").read_bytes()
    for full in (False, True):
        whole = one(shard, full=full)
        assert (whole.fault, whole.note) == (None, None)
        assert whole.documents >= 2
    assert one(shard, full=True).documents == (2 + len(MANY) if options else 2 + len(TEXTS) * 2)
    wrong_id(out, shard.name, 0)
    found = one(shard, full=True)
    assert found.fault == "document 0 has other ids than its text"
    assert run(names, tasks=1, **options).tasks_run == 1  # it was struck from the record
    assert (out / "00000_tokens.bin").read_bytes() == good
    assert run(names, tasks=1, **options).tasks_run == 0
    assert not [name for name in os.listdir(out) if name.startswith(".tmp")]


@pytest.mark.slow
def test_a_sample_finds_what_it_looks_at(run: Run, data: Path, out: Path) -> None:
    write_jsonl(data / "b.jsonl", MANY)
    run(["b.jsonl"])
    for place in (0, 100, -3):  # fewer documents than a sample has: all are looked at
        wrong_id(out, "00000_tokens", place)
        found = one(out / "00000_tokens")
        assert found.fault is not None
        assert found.fault.startswith("document ")
        assert found.fault.endswith("of b.jsonl")
        assert run(["b.jsonl"]).tasks_run == 1


@pytest.mark.slow
def test_why_a_shard_is_not_compared(run: Run, data: Path, out: Path, tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(data / "a.jsonl", MANY)
    run(["a.jsonl"])
    shard = out / "00000_tokens"
    os.rename(out / "logs" / "tokenizer.json", tmp_path / "elsewhere.json")
    assert "the copy of their tokenizer is gone" in str(one(shard).note)
    assert one(shard, tokenizer=str(tokenizer)).documents == 2 * len(TEXTS)
    os.rename(tmp_path / "elsewhere.json", out / "logs" / "tokenizer.json")
    write_jsonl(data / "a.jsonl", ["other"])
    assert one(shard).note == "a.jsonl is not what it was"
    (data / "a.jsonl").unlink()
    assert one(shard).note == "a.jsonl is gone"
    (out / "tokenization.json").unlink()
    assert compare_with_source([str(shard)], workers=1) == []


@pytest.mark.slow
def test_what_was_left_out_is_left_out_again(run: Run, data: Path, out: Path) -> None:
    write_jsonl(data / "a.jsonl", MANY)
    (data / "a.jsonl").write_text((data / "a.jsonl").read_text() + "what?\n")
    (data / "b.parquet").write_bytes(b"torn")
    run(["a.jsonl", "b.parquet"], tasks=1, on_error="skip-line")
    for full in (False, True):
        assert one(out / "00000_tokens", full=full) == SourceComparison(
            prefix=str(out / "00000_tokens"), documents=2 * len(TEXTS)
        )


@pytest.mark.slow
def test_verify_opens_a_finished_dump_again_and_a_submit_mends_it(settings: TokenizationSettings) -> None:
    metadata = DumpsFolder(settings.metadata_folder)
    for index in prepare_submission(settings):
        tokenize_dump(settings, index)
    assert [each.faults for each in verify_dumps(metadata.path, workers=1, full=True)] == [(), ()]
    first = settings.dump_output(0)
    good = {file.name: file.read_bytes() for file in first.glob("*_tokens.*")}
    wrong_id(first, "00000_tokens", 0)
    done = subprocess.run(
        [sys.executable, "-m", "relayrun.cli", "dumps", "verify", metadata.path, "--workers", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, done.stderr
    assert "00000_tokens: document 0 has other ids than its text" in done.stdout
    assert "opened again: submit" in done.stdout
    assert "dump 1: " in done.stdout
    assert (metadata.pending(), metadata.finished()) == ([0], [1])
    for index in prepare_submission(settings):
        tokenize_dump(settings, index)
    assert {file.name: file.read_bytes() for file in first.glob("*_tokens.*")} == good
    (first / "00000_tokens.idx").unlink()
    with metadata.in_use():  # a dump is being tokenized
        torn, _ = verify_dumps(metadata.path, workers=1)
    assert "this one is missing" in torn.faults[0]
    assert "stays finished (the dumps of this folder are being" in torn.summary()
    assert metadata.pending() == []
    verify_dumps(metadata.path, workers=1)
    assert metadata.pending() == [0]


def test_dumps_that_are_not_finished_are_not_verified(settings: TokenizationSettings) -> None:
    with pytest.raises(InputError, match="no dump is finished here"):
        verify_dumps(settings.metadata_folder, workers=1)


@pytest.mark.slow
def test_the_door_compares_a_sample(run: Run, data: Path, out: Path) -> None:
    write_jsonl(data / "a.jsonl", MANY)
    run(["a.jsonl"])
    command = [sys.executable, ROOT / "scripts/tools/verify_dataset.py", out]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert f"{2 * len(TEXTS)} documents tokenized again from their files" in done.stdout
    wrong_id(out, "00000_tokens", 0)
    failed = subprocess.run([*command, "--full"], capture_output=True, text=True, check=False, timeout=600)
    assert failed.returncode == 1
    assert "00000_tokens: document 0 has other ids than its text" in failed.stdout
    assert "1 of 1 shards have faults" in failed.stderr
