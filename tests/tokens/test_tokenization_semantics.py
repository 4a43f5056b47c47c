"""What stands in a shard: BOS, EOD, empty documents, token types, columns, checksums, files that join or fail."""

# ruff: noqa: F811 - fixtures are imported by name
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from relayrun.errors import InputError
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize import shard_task
from relayrun.tokens.tokenize.encode import engines
from relayrun.tokens.tokenize.pipeline import TokenizeResult
from tests.tokenization_corpus import EOS, TEXTS, expected_ids, shard_documents, write_parquet
from tests.tokens.test_preprocess import data, out, run, tokenizer, write_jsonl  # noqa: F401 - fixtures

Run = Any


def name_tokens(tokenizer: Path, **tokens: str) -> None:
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps(tokens))


def test_a_bos_stands_in_front_of_every_document_if_asked(run: Run, data: Path, out: Path, tokenizer: Path) -> None:
    name_tokens(tokenizer, bos_token="<s>", eos_token=EOS)
    write_parquet(data / "a.parquet", list(TEXTS))
    run(["a.parquet"], bos=True)
    assert shard_documents(out / "00000_tokens") == [[1, *ids] for ids in expected_ids(tokenizer, TEXTS)]


def test_a_bos_that_the_tokenizer_does_not_name_is_refused(run: Run, data: Path) -> None:
    write_parquet(data / "a.parquet", ["x"])
    with pytest.raises(InputError, match="names no token to begin documents with"):
        run(["a.parquet"], bos=True)


@pytest.mark.slow
def test_without_an_eod_documents_end_as_they_are(run: Run, data: Path, out: Path, tokenizer: Path) -> None:
    write_parquet(data / "a.parquet", list(TEXTS))
    run(["a.parquet"], append_eod="no")
    assert shard_documents(out / "00000_tokens") == [ids[:-1] for ids in expected_ids(tokenizer, TEXTS)]


def word_level(folder: Path, size: int, *, special: str | None = None) -> Path:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size - (special is not None))}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        made.add_special_tokens([AddedToken(special, special=True)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_an_eod_is_required_unless_auto_which_warns(
    run: Run,
    data: Path,
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = str(word_level(tmp_path / "plain", 50))
    write_parquet(data / "a.parquet", ["w1 w2"])
    with pytest.raises(InputError, match="which token ends a document"):
        run(["a.parquet"], tokenizer=plain)
    run(["a.parquet"], tokenizer=plain, append_eod="auto")
    assert "no token will stand between documents" in capsys.readouterr().err
    assert shard_documents(out / "00000_tokens") == [[1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (65_536, np.int32), (65_537, np.int32)]
)
def test_the_token_type_follows_megatrons_rule(
    run: Run,
    data: Path,
    out: Path,
    tmp_path: Path,
    size: int,
    dtype: type,
) -> None:
    made = word_level(tmp_path / "words", size, special="</s>")
    write_parquet(data / "a.parquet", [f"w1 w{size - 2}"])
    run(["a.parquet"], tokenizer=str(made))
    assert Shard.open(out / "00000_tokens").dtype == np.dtype(dtype)
    assert shard_documents(out / "00000_tokens") == [[1, size - 2, size - 1]]


@pytest.mark.slow
def test_special_text_becomes_special_ids_only_if_asked(run: Run, data: Path, out: Path, tmp_path: Path) -> None:
    write_parquet(data / "a.parquet", [f"a{EOS}b"])
    run(["a.parquet"], engine="gigatoken")
    run(["a.parquet"], special_text=True, output_folder=tmp_path / "special")
    (plain,), (special,) = (shard_documents(folder / "00000_tokens") for folder in (out, tmp_path / "special"))
    assert (plain.count(0), special.count(0)) == (1, 2)
    assert special == [special[0], 0, special[2], 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, while megatron-core imports it
@pytest.mark.parametrize("keep_empty", [False, True])
def test_shards_are_the_bytes_of_megatrons_builder(
    run: Run,
    data: Path,
    out: Path,
    tmp_path: Path,
    tokenizer: Path,
    keep_empty: bool,
) -> None:
    """As Megatron-LM's tools/preprocess_data.py --append-eod does it: its builder, and its loop over documents."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    texts = ["", *TEXTS, "", "", "last", ""]
    write_jsonl(data / "a.jsonl", texts)
    result: TokenizeResult = run(["a.jsonl"], keep_empty=keep_empty)
    assert (result.documents, result.empty_documents) == ((len(texts), 0) if keep_empty else (len(TEXTS) + 1, 4))
    prefix = str(tmp_path / "megatron")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(400))
    for text in texts:
        if text:
            ids = expected_ids(tokenizer, [text])[0]
            builder.add_document(ids, [len(ids)])
        elif keep_empty:
            builder.add_document([], [])
    builder.finalize(prefix + ".idx")
    for suffix in (".bin", ".idx"):
        assert (out / f"00000_tokens{suffix}").read_bytes() == Path(prefix + suffix).read_bytes()


def test_nested_columns_are_read_from_every_kind_of_file(run: Run, data: Path, out: Path, tokenizer: Path) -> None:
    rows = [{"a": {"b": "one", "c": 1}}, {"a": None}, {"a": {"b": None, "c": 2}}, {"a": {"b": "two", "c": 3}}]
    pq.write_table(pa.Table.from_pylist(rows), data / "a.parquet")
    (data / "b.jsonl").write_text('{"a": {"b": "three"}}\n{"a.b": "four"}\n')
    result = run(["a.parquet", "b.jsonl"], column="a.b", tasks=1)
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, ["one", "two", "three", "four"])
    assert result.null_documents == 2
    with pytest.raises(InputError, match=r"no column 'a\.x'; there are: a, a\.b, a\.c"):
        list(read_column(str(data / "a.parquet"), "a.x", batch_bytes=1000))


def test_a_path_with_a_scheme_is_read_through_fsspec() -> None:
    with fsspec.open("memory://bucket/x.jsonl", "wb") as file:
        file.write(b'{"text": "far"}\n')
    assert [array.to_pylist() for array in read_column("memory://bucket/x.jsonl", "text", batch_bytes=1000)] == [
        ["far"]
    ]


class Bucket(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A store of objects, with the scheme and the fields of one."""

    protocol = "bucket"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("bucket://", "memory://")))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {"name": found["name"], "size": found["size"], "LastModified": found["created"], "type": "file"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["memory", "file", "bucket"])
def test_a_dataset_with_a_scheme_gives_the_same_shards(
    run: Run, data: Path, out: Path, tmp_path: Path, scheme: str
) -> None:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    names = ["a.parquet", "b.jsonl", "c.jsonl.gz", "d.jsonl.zst"]
    write_parquet(data / names[0], list(TEXTS))
    for name in names[1:]:
        write_jsonl(data / name, list(TEXTS))
    url = f"file://{data}" if scheme == "file" else f"{scheme}://texts-{tmp_path.name}"
    if scheme != "file":
        for name in names:
            with fsspec.open(f"{url}/{name}", "wb") as file:
                file.write((data / name).read_bytes())
    run(names)
    far = tmp_path / "far"
    assert run(names, dataset=url, output_folder=far).tasks_run == 4
    assert run(names, dataset=url, output_folder=far).tasks_run == 0
    for file in (*far.glob("*.bin"), *far.glob("*.idx")):
        assert file.read_bytes() == (out / file.name).read_bytes()
    with pytest.raises(InputError, match=r"texts|da ta"):
        run([*names, "missing.jsonl"], dataset=url, output_folder=far)
    with pytest.raises(InputError, match="fsspec cannot use this"):
        run(names, dataset="nowhere://x", output_folder=far)


def test_the_record_holds_inputs_engine_counts_and_checksums(run: Run, data: Path, out: Path) -> None:
    write_parquet(data / "a.parquet", ["x", "", None, "new digit \U00011de1"])
    run(["a.parquet"])
    record = json.loads((out / "tokenization.json").read_text())
    task = record["shards"]["00000_tokens"]
    assert task["inputs"][0][:2] == ["a.parquet", (data / "a.parquet").stat().st_size]
    digest = xxhash.xxh3_128((data / "a.parquet").read_bytes()).hexdigest()
    assert task["fingerprints"] == [f"xxh3-128:{digest}"]
    assert (task["documents"], task["empty_documents"], task["null_documents"]) == (2, 1, 1)
    assert (task["engine"], task["engine_version"], task["routed_documents"]) == ("gigatoken", "0.10.0", 1)
    for suffix, digest in task["xxh3_128"].items():
        assert xxhash.xxh3_128((out / f"00000_tokens.{suffix}").read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_files_that_join_get_shards_of_their_own_and_the_others_stay(
    run: Run, data: Path, out: Path, tokenizer: Path
) -> None:
    for name in "abcd":
        write_parquet(data / f"{name}.parquet", [name])
    run(["b.parquet", "c.parquet"], tasks=2)
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("0*")}
    result = run(["a.parquet", "b.parquet", "c.parquet", "d.parquet"], tasks=2)
    assert result.tasks_run == 2
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    found = [shard_documents(out / f"0000{number}_tokens") for number in range(4)]
    assert found == [expected_ids(tokenizer, [name]) for name in "bcad"]


def test_a_file_that_was_only_copied_again_is_not_tokenized_again(run: Run, data: Path) -> None:
    write_parquet(data / "a.parquet", list(TEXTS))
    run(["a.parquet"])
    os.utime(data / "a.parquet", (1, 1))
    assert run(["a.parquet"]).tasks_run == 0


@pytest.mark.slow
def test_a_torn_file_is_left_out_if_asked_and_named(
    run: Run,
    data: Path,
    out: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(data / "a.jsonl", TEXTS)
    (data / "b.jsonl").write_text('{"text": "half"}\n{"te')
    write_jsonl(data / "c.jsonl", ["end"])
    result = run(["a.jsonl", "b.jsonl", "c.jsonl"], tasks=1, on_error="skip-file", batch_bytes=1)
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, [*TEXTS, "end"])
    assert (result.documents, result.skipped_files) == (len(TEXTS) + 1, 1)
    assert "left out: " in capsys.readouterr().err
    task = json.loads((out / "tokenization.json").read_text())["shards"]["00000_tokens"]
    assert task["skipped"][0]["file"] == "b.jsonl"
    assert xxhash.xxh3_128((out / "00000_tokens.bin").read_bytes()).hexdigest() == task["xxh3_128"]["bin"]
    assert run(["a.jsonl", "b.jsonl", "c.jsonl"], tasks=1, on_error="skip-file").tasks_run == 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_long_documents_are_tokenized_in_pieces_to_the_same_bytes(
    run: Run, data: Path, out: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    name_tokens(tokenizer, bos_token="<s>", eos_token=EOS)
    texts = ["short", "\n".join([*TEXTS, "a new digit \U00011de1"] * 3), "", "x\ny" * 200, *TEXTS]
    write = write_parquet if suffix == "parquet" else write_jsonl
    write(data / f"a.{suffix}", texts)
    run([f"a.{suffix}"], bos=True)
    monkeypatch.setattr(shard_task, "PIECE_BYTES", 30)
    encoded: list[int] = []
    encode = engines.RoutedEngine.encode

    def counted(self: engines.RoutedEngine, texts: PackedTexts) -> engines.Encoded:
        encoded.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(engines.RoutedEngine, "encode", counted)
    run([f"a.{suffix}"], bos=True, batch_bytes=500, output_folder=tmp_path / "pieces")
    assert len(encoded) > 20
    for suffix in ("bin", "idx"):
        file = f"00000_tokens.{suffix}"
        assert (tmp_path / "pieces" / file).read_bytes() == (out / file).read_bytes()
    one, other = (
        json.loads((folder / "tokenization.json").read_text())["shards"]["00000_tokens"]
        for folder in (out, tmp_path / "pieces")
    )
    for name in ("documents", "tokens", "empty_documents", "routed_documents", "xxh3_128"):
        assert one[name] == other[name], name


@pytest.mark.parametrize("keep_empty", [False, True])
def test_texts_without_a_known_letter_are_empty_however_long_they_are(
    run: Run, data: Path, out: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, keep_empty: bool
) -> None:
    made = Tokenizer(models.BPE({"A": 0, "C": 1, "G": 2, "T": 3}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens([EOS, "<s>"])
    made.save(str(tokenizer))
    name_tokens(tokenizer, bos_token="<s>", eos_token=EOS)
    write_parquet(data / "a.parquet", ["N" * 100, "N" * 50 + "ACGT" * 20, "", "GATTACA", "N" * 2000, "T" * 300])
    run(["a.parquet"], bos=True, keep_empty=keep_empty)
    monkeypatch.setattr(shard_task, "PIECE_BYTES", 16)
    run(["a.parquet"], bos=True, keep_empty=keep_empty, batch_bytes=40, output_folder=tmp_path / "pieces")
    for suffix in ("bin", "idx"):
        file = f"00000_tokens.{suffix}"
        assert (tmp_path / "pieces" / file).read_bytes() == (out / file).read_bytes()
    whole, pieces = (
        json.loads((folder / "tokenization.json").read_text())["shards"]["00000_tokens"]
        for folder in (out, tmp_path / "pieces")
    )
    assert whole["documents"] == pieces["documents"] == (6 if keep_empty else 3)
    assert whole["empty_documents"] == pieces["empty_documents"] == (0 if keep_empty else 1)
    if not keep_empty:
        assert whole["losses"] == pieces["losses"]
        assert whole["losses"]["lost documents"] == 2
    assert shard_documents(out / "00000_tokens")[-1] == [5, *[3] * 300, 4]


def test_another_tokenizer_under_the_same_path_is_another_tokenizer(
    run: Run, data: Path, out: Path, tokenizer: Path
) -> None:
    write_parquet(data / "a.parquet", ["ACGT"])
    for order in ("ACGT", "TGCA"):
        shutil.rmtree(out, ignore_errors=True)
        made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(order)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.add_special_tokens([EOS])
        made.save(str(tokenizer))
        run(["a.parquet"], workers=1)
        assert shard_documents(out / "00000_tokens") == [[*map(order.index, "ACGT"), 4]]


MEMORY = """
import resource, sys
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
if __name__ == "__main__":
    tokenizer, out, data, paths = sys.argv[1:]
    tokenize_paths_file(TokenizeOptions(tokenizer=tokenizer), output_folder=out, dataset=data, paths_file=paths)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_the_memory_of_a_worker_stays_bounded_however_long_a_document_is(
    tmp_path: Path, data: Path, tokenizer: Path
) -> None:
    long = ("a long document " * 64 + "\n") * 1000  # 1 MB
    texts = [long * 20, *(f"{number} {long}" for number in range(60))]
    write_jsonl(data / "a.jsonl", texts)
    # pages of a few rows: Arrow reads a page at a time, and by itself writes up to 1024 rows into one
    table = pa.table({"text": [long * 60, *texts]})
    pq.write_table(table, data / "b.parquet", use_dictionary=False, write_batch_size=1)
    (tmp_path / "paths").write_text("a.jsonl\nb.parquet\n")
    (tmp_path / "program.py").write_text(MEMORY)
    done = subprocess.run(
        [sys.executable, "program.py", tokenizer, "out", data, "paths"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert int(done.stdout.splitlines()[-1]) < 600
