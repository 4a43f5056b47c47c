"""Files that change, vanish or come after their dump is finished: each is named, and only its shard is made again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import DumpsFolder, merged_prefix, prepare_dumps, unmerged_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.shard_folder import FolderRecord
from relayrun.tokens.tokenize.verify import verify_dumps
from tests.tokenization_corpus import dump_settings, train_tokenizer


def write(file: Path, *texts: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, name in enumerate("abc"):
        write(tmp_path / "data" / f"{name}.jsonl", f"text {number}", *["the same words"] * number)
    return tmp_path / "data"


@pytest.fixture
def settings(tmp_path: Path, data: Path) -> TokenizationSettings:
    """One finished dump of three files, each with a shard."""
    settings = dump_settings(tmp_path, train_tokenizer(tmp_path / "tok" / "tokenizer.json"), workers=1)
    prepare_dumps(data, settings.metadata_folder)
    submit(settings)
    return settings


def submit(settings: TokenizationSettings) -> None:
    for index in prepare_submission(settings):
        tokenize_dump(settings, index)


def documents(settings: TokenizationSettings) -> list[int]:
    """Documents of all shards, sorted."""
    return sorted(Shard.open(prefix).documents for prefix in find_prefixes([settings.dataset_output]))


def made(settings: TokenizationSettings) -> dict[str, float]:
    return {name: task.started for name, task in FolderRecord.read(settings.dump_output(0)).tasks.items()}


def test_a_file_that_changed_is_named_and_its_shard_alone_is_made_again(
    settings: TokenizationSettings, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = made(settings)
    write(data / "b.jsonl", "text 1", "another one", "and more")
    os.utime(data / "a.jsonl")  # another time, the same bytes
    (verified,) = verify_dumps(settings.metadata_folder, workers=1)
    assert [fault.split("/")[-1] for fault in verified.faults] == ["00001_tokens is stale: b.jsonl is not what it was"]
    assert DumpsFolder(settings.metadata_folder).pending() == [0]
    DumpsFolder(settings.metadata_folder).finish(0)  # as if it had not been verified
    write(data / "new.jsonl", "a file that came", "with", "four", "lines")
    dumps = prepare_dumps(data, settings.metadata_folder)
    assert [(dump.index, [file.path for file in dump.files]) for dump in dumps] == [
        (0, ["c.jsonl", "b.jsonl", "a.jsonl"]),
        (1, ["new.jsonl"]),
    ]
    assert "dump 0: 1 of its files changed since" in caplog.text
    assert [dump.index for dump in prepare_dumps(data, settings.metadata_folder)] == [0, 1]  # once more: the same
    submit(settings)
    assert documents(settings) == [1, 3, 3, 4]
    after = made(settings)
    assert [name for name in after if after[name] != before[name]] == ["00001_tokens"]
    (verified, _) = verify_dumps(settings.metadata_folder, workers=1)
    assert verified.faults == ()
    with pytest.raises(InputError, match="all 4 files are in finished dumps"):
        prepare_dumps(data, settings.metadata_folder)


def test_a_file_that_is_gone_leaves_its_dump(
    settings: TokenizationSettings, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = made(settings)
    (data / "c.jsonl").rename(data / "moved.jsonl")
    prepare_dumps(data, settings.metadata_folder)
    assert "dump 0: 1 of its files are gone since it was tokenized" in caplog.text
    submit(settings)
    assert documents(settings) == [1, 2, 3]
    after = made(settings)
    assert [name for name in after if after[name] != before[name]] == ["00000_tokens"]
    for verified in verify_dumps(settings.metadata_folder, workers=1, full=True):
        assert verified.faults == ()
    for name in ("a", "b"):
        (data / f"{name}.jsonl").unlink()
    with pytest.raises(InputError, match="all 1 files are in finished dumps"):
        prepare_dumps(data, settings.metadata_folder)
    assert "dump 0: all its files are gone: its shards stay" in caplog.text


def test_a_merged_shard_of_a_dump_that_was_made_again_is_stale(settings: TokenizationSettings, data: Path) -> None:
    from relayrun.tokens.shards.merge import merge_shards

    merged = merged_prefix(settings.dataset_output, "dump-0")
    merged.parent.mkdir()
    merge_shards(find_prefixes([settings.dump_output(0)]), merged)
    assert unmerged_dumps(settings.dataset_output) == []
    write(data / "a.jsonl", "text 7")  # of the same size
    prepare_dumps(data, settings.metadata_folder)
    submit(settings)
    with pytest.raises(RelayrunError, match=r"it is stale: .*00002_tokens was made again since"):
        unmerged_dumps(settings.dataset_output)


def test_rows_that_are_expected_are_compared_with_rows_that_are_tokenized(
    settings: TokenizationSettings, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> dict[str, Any]:
        text = (Path(settings.metadata_folder) / "inventory.jsonl").read_text()
        return {line["path"]: line for line in map(json.loads, text.splitlines())}

    assert {name: line["rows"] for name, line in lines().items()} == {"a.jsonl": 1, "b.jsonl": 2, "c.jsonl": 3}
    saved = data / "saved"
    for number, texts in enumerate((["one more", ""], [None, "and more"])):
        write_stream(saved / f"data-0000{number}-of-00002.arrow", texts)
    files = [{"filename": file.name} for file in sorted(saved.iterdir())]
    (saved / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    for expected in (4, 5):
        splits = {"train": {"num_examples": expected}}
        (saved / "dataset_info.json").write_text(json.dumps({"splits": splits}))
        if expected == 4:
            prepare_dumps(data, settings.metadata_folder)
        else:  # its files are as they were
            DumpsFolder(settings.metadata_folder).reopen(1)
        submit(settings)
        found = lines()
        assert found["saved/dataset_info.json"]["splits"]["train"] == {"expected_rows": expected, "rows": 4}
        assert found["saved/data-00000-of-00002.arrow"]["rows"] == 2
        assert (
            "saved/dataset_info.json: 4 rows of train were tokenized, and 5 are listed, perhaps" in caplog.text
        ) == (expected == 5)
    assert lines()["b.jsonl"]["rows"] == 2  # also after another prepare


def write_stream(file: Path, texts: list[str | None]) -> None:
    file.parent.mkdir(exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table)
