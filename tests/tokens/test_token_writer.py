from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader

from relayrun.tokens.shards.checks import verify_shards
from relayrun.tokens.shards.shard import ShardRecords
from relayrun.tokens.tokenize import MegatronTokenWriter
from relayrun.tokens.tokenize.encode.tokenizer import ids_fingerprint, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from tests.tokenization_corpus import TEXTS, expected_ids, shard_documents, train_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return train_tokenizer(tmp_path / "tok" / "tokenizer.json")


def documents(texts: list[str]) -> list[Document]:
    return [Document(text=text, id=str(row)) for row, text in enumerate(texts)]


@pytest.mark.slow
def test_it_stands_behind_datatroves_own_reader_and_filter(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, texts in (("a", TEXTS[:4]), ("b", TEXTS[4:])):
        lines = [json.dumps({"text": text, "id": "x"}) for text in texts]
        (tmp_path / "in" / f"{name}.jsonl").write_text("\n".join(lines))
    pipeline = [
        JsonlReader(str(tmp_path / "in")),
        LambdaFilter(lambda document: "fox" not in document.text),
        MegatronTokenWriter(tmp_path / "out", str(tokenizer)),
    ]
    LocalPipelineExecutor(pipeline, tasks=2, workers=1, logging_dir=str(tmp_path / "logs")).run()
    expected = expected_ids(tokenizer, TEXTS)
    assert shard_documents(tmp_path / "out" / "00000_tokens") == expected[1:4]
    assert shard_documents(tmp_path / "out" / "00001_tokens") == expected[4:]


@pytest.mark.filterwarnings("ignore")  # of torch, while megatron-core imports it
def test_shards_open_in_megatrons_indexed_dataset(tmp_path: Path, tokenizer: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    MegatronTokenWriter(tmp_path, str(tokenizer)).run(documents(list(TEXTS)), rank=7)
    dataset = IndexedDataset(str(tmp_path / "00007_tokens"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected_ids(tokenizer, TEXTS)
    assert dataset.document_indices.tolist() == list(range(len(TEXTS) + 1))
    assert dataset.index.dtype is np.uint16


def test_its_shards_say_which_tokenizer_made_them_and_have_checksums(tmp_path: Path, tokenizer: Path) -> None:
    MegatronTokenWriter(tmp_path / "out", str(tokenizer)).run(documents(list(TEXTS)))
    prefix = str(tmp_path / "out" / "00000_tokens")
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(tokenizer)))
    record = ShardRecords().of(prefix)
    assert record is not None
    assert record.made is not None
    assert (record.made.ids, record.made.eos) == (ids_fingerprint(loaded.definition), loaded.eos_id)
    assert verify_shards([prefix])[0].faults == ()
    ids = bytearray(Path(prefix + ".bin").read_bytes())
    ids[0] ^= 1
    Path(prefix + ".bin").write_bytes(ids)
    assert verify_shards([prefix])[0].faults == ("the .bin is not what its record says (xxh3-128)",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds",
    [
        {"batch_size": 1},
        *(pytest.param(more, marks=pytest.mark.long) for more in ({"batch_size": 3}, {"batch_bytes": 50}, {})),
    ],
)
def test_batches_do_not_change_the_shard(tmp_path: Path, tokenizer: Path, bounds: dict[str, int]) -> None:
    texts = [*TEXTS, "a long one " * 100_000, *TEXTS]
    MegatronTokenWriter(tmp_path, str(tokenizer), **bounds).run(documents(texts))
    assert shard_documents(tmp_path / "00000_tokens") == expected_ids(tokenizer, texts)


def test_batches_are_bounded_by_bytes_and_by_count(tokenizer: Path, tmp_path: Path) -> None:
    writer = MegatronTokenWriter(tmp_path, str(tokenizer), batch_size=3, batch_bytes=10)
    texts = ["1234", "5678", "90", "a" * 50, "b", "c", "d", "e"]
    batches = [batch.strings() for batch in writer._batches(documents(texts))]
    assert batches == [["1234", "5678", "90"], ["a" * 50], ["b", "c", "d"], ["e"]]


def test_empty_documents_are_dropped_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    writer = MegatronTokenWriter(tmp_path, str(tokenizer))
    writer.run(documents(["", "one", "", " ", ""]))
    assert shard_documents(tmp_path / "00000_tokens") == expected_ids(tokenizer, ["one", " "])
    assert writer.stats["empty documents"].total == 3
    assert writer.stats["documents"].total == 2


def test_nothing_is_left_without_documents_or_after_an_error(tmp_path: Path, tokenizer: Path) -> None:
    def torn() -> object:
        yield from documents(list(TEXTS))
        raise ValueError("torn")

    writer = MegatronTokenWriter(tmp_path / "out", str(tokenizer), batch_size=1)
    writer.run(documents(["", ""]))
    with pytest.raises(ValueError, match="torn"):
        writer.run(torn())  # type: ignore[arg-type]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_step_can_be_sent_to_a_worker(tmp_path: Path, tokenizer: Path) -> None:
    writer = MegatronTokenWriter(tmp_path, str(tokenizer))
    for twin in (copy.deepcopy(writer), pickle.loads(pickle.dumps(writer))):
        twin.run(documents(["x"]))
        assert shard_documents(tmp_path / "00000_tokens") == expected_ids(tokenizer, ["x"])


@pytest.mark.slow
def test_a_tokenizer_that_changed_on_disk_is_loaded_again(tmp_path: Path, tokenizer: Path) -> None:
    MegatronTokenWriter(tmp_path, str(tokenizer)).run(documents(list(TEXTS)))
    train_tokenizer(tokenizer, vocabulary=300)
    MegatronTokenWriter(tmp_path, str(tokenizer)).run(documents(list(TEXTS)))
    assert shard_documents(tmp_path / "00000_tokens") == expected_ids(tokenizer, TEXTS)
