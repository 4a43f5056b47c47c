"""Steps of datatrove between the readers and the writer of a dump's shards."""

from __future__ import annotations

import gzip
import importlib.util
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import LambdaFilter, c4_filters, unigram_log_probs, url_filter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.utils import word_tokenizers
from datatrove.utils.word_tokenizers import WordTokenizer
from tokenizers import Tokenizer

from relayrun.cli import main
from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.dump_status import read_status, status_table
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import TokenizeResult, tokenize_paths_file
from relayrun.tokens.tokenize.shard_folder import describe_step_counts
from relayrun.tokens.tokenize.steps import build_step, check_steps
from relayrun.tokens.tokenize.verify import compare_with_source
from tests.killed_calls import KillAtCall
from tests.tokenization_corpus import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
HERE = __name__


class Upper(PipelineStep):  # type: ignore[misc]
    """A step of the user's own, which is neither a filter nor a formatter."""

    name, type = "upper", "own"

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for document in data:
            if "drop me" not in document.text:
                document.text = document.text.upper()
                yield document


def is_even(document: Document) -> bool:
    return int(document.text.split()[-1]) % 2 == 0


def keeps_half(document: Document) -> bool:
    document.metadata["luck"] = random.random()
    return bool(document.metadata["luck"] < 0.5)


class Workplace:
    """A data set of three jsonl files, and runs over it."""

    def __init__(self, folder: Path, texts: list[list[Any]]) -> None:
        self.folder = folder
        self.tokenizer = train_tokenizer(folder / "tok" / "tokenizer.json")
        self.data = folder / "data"
        self.data.mkdir()
        self.names = [f"{number}.jsonl" for number in range(len(texts))]
        for name, rows in zip(self.names, texts, strict=True):
            lines = [json.dumps(row if isinstance(row, dict) else {"text": row}) + "\n" for row in rows]
            (self.data / name).write_text("".join(lines))
        self.write_paths(self.names)

    def write_paths(self, names: list[str]) -> None:
        self.names = names
        (self.folder / "paths").write_text("".join(f"{name}\n" for name in names))

    def run(self, pipeline: list[Any], out: str = "out", **options: Any) -> TokenizeResult:
        given = {"tasks": 3, "workers": 1, **options}
        return tokenize_paths_file(
            TokenizeOptions(tokenizer=str(self.tokenizer), pipeline=tuple(pipeline), **given),
            output_folder=self.folder / out,
            dataset=self.data,
            paths_file=self.folder / "paths",
            logging_dir=self.folder / f"{out}-logs",
        )

    def texts(self, out: str = "out") -> list[str]:
        return shard_texts(self.folder / out, self.tokenizer)

    def dropped(self, out: str = "out") -> list[dict[str, Any]]:
        files = sorted((self.folder / out / "exclusions").iterdir())
        return [json.loads(line) for file in files for line in gzip.open(file, "rt", encoding="utf-8")]

    def record(self, out: str = "out") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / out / "tokenization.json").read_text())
        return found

    def bytes(self, out: str) -> dict[str, bytes]:
        files = [*(self.folder / out).glob("*.bin"), *(self.folder / out).glob("*.idx")]
        files += (self.folder / out / "exclusions").iterdir()
        return {file.name: file.read_bytes() for file in files}


def shard_texts(folder: Path, tokenizer: Path) -> list[str]:
    reader, found = Tokenizer.from_file(str(tokenizer)), []
    for file in sorted(folder.glob("*.bin")):
        shard = Shard.open(str(file).removesuffix(".bin"))
        begin = 0
        for length in shard.lengths().tolist():
            found.append(reader.decode(shard.ids()[begin : begin + length - 1].tolist(), skip_special_tokens=False))
            begin += length
    return found


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path, [[f"document {file} {row}" for row in range(10)] for file in range(3)])


def test_steps_stand_between_reader_and_writer(place: Workplace) -> None:
    result = place.run([{"lambda": {"filter_function": f"{HERE}.is_even"}}, f"{HERE}:Upper"])
    assert place.texts() == [f"DOCUMENT {file} {row}" for file in range(3) for row in range(0, 10, 2)]
    assert result.documents == 15
    assert "steps: lambda 30 in, 15 out (50% of the bytes, about 0.0 Mtok); " in result.summary()
    half = {"step": "x", "in": 4, "out": 2, "bytes_in": 8_000_000, "bytes_out": 4_000_000}
    last = {"step": "y", "in": 2, "out": 1, "bytes_in": 4_000_000, "bytes_out": 1_000_000}
    said = "x 8 in, 4 out (50% of the bytes, about 2.4 Mtok); y 4 in, 2 out (25% of the bytes, about 0.6 Mtok)"
    assert describe_step_counts([[half, last], [half, last]], 600_000) == said
    record = place.record()
    assert record["shards"]["00000_tokens"]["steps"] == [
        {"step": "lambda", "in": 10, "out": 5, "bytes_in": 120, "bytes_out": 60, "dropped": {"dropped": 5}},
        {"step": f"{HERE}:Upper", "in": 5, "out": 5, "bytes_in": 60, "bytes_out": 60, "dropped": {}},
    ]
    first, second = record["settings"]["pipeline"]
    assert first["class"] == "datatrove.pipeline.filters.lambda_filter.LambdaFilter"
    assert first["arguments"] == {"filter_function": f"{HERE}.is_even"}
    assert re.fullmatch(r"0\.10\.\d+", first["versions"]["datatrove"])
    assert second["versions"][HERE].startswith("sha256:")


def test_dropped_documents_have_their_reason_and_a_shard_of_other_steps_is_refused(place: Workplace) -> None:
    (place.data / "1.jsonl").write_text(json.dumps({"text": "1 drop me", "id": "mine", "url": "u", "size": 3}) + "\n")
    place.run([f"{HERE}.Upper"])
    assert place.dropped() == [
        {
            "id": "mine",
            "file": "1.jsonl",
            "row": 0,
            "step": f"{HERE}.Upper",
            "reason": "dropped",
            "scores": {},
            "text": "1 drop me",
            "metadata": {"url": "u", "size": 3},
        }
    ]
    assert place.run([f"{HERE}.Upper"]).tasks_run == 0
    with pytest.raises(InputError, match="another choice of exclusions, pipeline"):
        place.run([])


def test_a_damaged_file_of_dropped_documents_is_made_again(place: Workplace) -> None:
    steps = [{"lambda": {"filter_function": f"{HERE}.is_even"}}]
    place.run(steps)
    files = place.bytes("out")
    (place.folder / "out/exclusions/00001_tokens.jsonl.gz").write_bytes(b"torn")
    (place.folder / "out/exclusions/00002_tokens.jsonl.gz").unlink()
    assert place.run(steps).tasks_run == 2
    assert place.bytes("out") == files


def is_even_by_number(document: Document) -> tuple[bool, str] | bool:
    return is_even(document) or (False, f"{document.metadata['number']} is odd")


def test_dropped_documents_as_parquet_are_the_rows_of_datatroves_writer(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"document {row}", "id": f"d{row}", "number": row, "url": f"http://{row}"} for row in range(2500)]
    (place.data / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.write_paths(["1.jsonl"])
    steps = [{"lambda": {"filter_function": f"{HERE}.is_even_by_number"}}]
    place.run(steps, "lines")
    place.run(steps, exclusions="parquet")
    table = pq.read_table(place.folder / "out/exclusions/00000_tokens.parquet").to_pylist()
    mine = [{**row, "metadata": json.loads(row["metadata"]), "scores": json.loads(row["scores"])} for row in table]
    assert mine == [{**line, "cut": None} for line in place.dropped("lines")]
    folder = place.folder / "theirs"
    writer = ParquetWriter(str(folder / "removed"), max_file_size=-1)
    theirs = [
        JsonlReader(str(place.data), paths_file=str(place.folder / "paths"), add_file_path=False),
        LambdaFilter(is_even_by_number, exclusion_writer=writer),
    ]
    LocalPipelineExecutor(theirs, tasks=1, workers=1, logging_dir=str(folder / "logs")).run()
    removed = pq.read_table(folder / "removed").to_pylist()
    found = [{name: row[name] for name in ("text", "id")} | {"metadata": row["metadata"]} for row in mine]
    assert [
        {**row, "metadata": {**row["metadata"], "filter_reason": reason}}
        for row, reason in zip(found, (row["reason"] for row in mine), strict=True)
    ] == removed
    assert len(removed) == 1250
    assert main(["data", "why", "d7", str(place.folder / "out")]) == 0
    assert "d7: dropped by lambda: 7 is odd (row 7 of 1.jsonl, shard 00000_tokens)" in capsys.readouterr().out
    assert place.run(steps, exclusions="parquet").tasks_run == 0
    before = place.bytes("out")
    (place.folder / "out/exclusions/00000_tokens.parquet").write_bytes(b"torn")
    assert place.run(steps, exclusions="parquet").tasks_run == 1
    assert place.bytes("out") == before
    with pytest.raises(InputError, match="another choice of exclusions"):
        place.run(steps)


def test_a_file_that_is_left_out_leaves_no_row_in_a_table_of_dropped_documents(place: Workplace) -> None:
    """Nor does text that UTF-8 lacks, in columns and in a name of a file."""
    name = os.fsdecode(b"n\xff.jsonl")
    lines = ['{"text": "a 1", "id": "i\\udfff", "url": "\\ud800"}', '{"text": "a 1"}', '{"text": "a 2"}']
    (place.data / name).write_text("\n".join(lines))
    (place.data / "2.jsonl").write_text('{"text": "b 1"}\nno json\n')
    place.write_paths(["2.jsonl", "0.jsonl"])
    (place.folder / "paths").write_bytes(b"2.jsonl\nn\xff.jsonl\n0.jsonl\n")
    steps = [{"lambda": {"filter_function": f"{HERE}.is_even"}}]
    place.run(steps, tasks=1, on_error="skip-line", exclusions="parquet")
    table = pq.read_table(place.folder / "out/exclusions/00000_tokens.parquet").to_pylist()
    assert [row["file"] for row in table][:2] == ["2.jsonl", "n\\udcff.jsonl"]
    place.run(steps, "again", tasks=1, on_error="skip-file", exclusions="parquet")
    table = pq.read_table(place.folder / "again/exclusions/00000_tokens.parquet").to_pylist()
    assert {row["file"] for row in table} == {"0.jsonl", "n\\udcff.jsonl"}
    assert next((row["id"], json.loads(row["metadata"])) for row in table) == ("i\\udfff", {"url": "\ud800"})


def test_random_numbers_come_from_the_document(place: Workplace) -> None:
    """Whatever shards and workers: the same documents are kept, and a seed gives others."""
    steps: list[Any] = ["sampler", {"lambda": {"filter_function": f"{HERE}.keeps_half"}}]
    place.run(steps, "three")
    place.run(steps, "one", tasks=1, batch_documents=2, workers=2)
    assert sorted(place.texts("three")) == sorted(place.texts("one"))
    assert 0 < len(place.texts("one")) < 20
    scores = [each["scores"]["luck"] for each in place.dropped("one") if each["step"] == "lambda"]
    assert len(set(scores)) == len(scores) > 0
    place.run([{"sampler": {"seed": 1}}], "seed 1")
    place.run(["sampler"], "no seed")
    assert place.texts("seed 1") != place.texts("no seed")


def test_a_step_that_raises_is_named_with_the_document(place: Workplace) -> None:
    (place.data / "1.jsonl").write_text('{"text": "good 2"}\n{"text": "not a number"}\n{"text": "good 4"}\n')
    steps = [{"lambda": {"filter_function": f"{HERE}.is_even"}}]
    where = r"document 1\.jsonl/1 \(row 1 of 1\.jsonl\): step lambda raises ValueError: invalid literal"
    with pytest.raises(RelayrunError, match=where):
        place.run(steps, on_error="skip-file")
    place.run(steps, on_step_error="drop", on_error="skip-file")
    assert place.record()["shards"]["00001_tokens"]["steps"][0]["dropped"] == {"error: ValueError": 1}
    assert [each["id"] for each in place.dropped() if each["reason"] != "dropped"] == ["1.jsonl/1"]
    assert "good 4" in place.texts()


def test_bad_lines_keep_the_numbers_of_rows_and_a_skipped_file_leaves_no_count(place: Workplace) -> None:
    lines = ['{"text": "a 1"}', "no json", '{"text": null}', "[1]", '{"text": 5}', '{"text": ""}', '{"text": "b 3"}']
    (place.data / "0.jsonl").write_text("\n".join(lines))
    torn = gzip.compress(b"".join(json.dumps({"text": f"{i} {i}"}).encode() + b"\n" for i in range(90000)))
    (place.data / "x.jsonl.gz").write_bytes(torn[:-100000])
    place.write_paths(["0.jsonl", "x.jsonl.gz", "1.jsonl"])
    result = place.run([{"lambda": {"filter_function": f"{HERE}.is_even"}}], tasks=1, on_error="skip-line")
    assert [each["id"] for each in place.dropped() if each["file"] == "0.jsonl"] == ["0.jsonl/0", "0.jsonl/6"]
    assert {each["file"] for each in place.dropped()} == {"0.jsonl", "1.jsonl"}
    assert (result.null_documents, result.empty_documents, result.skipped_files) == (1, 1, 1)
    assert result.bad_lines == {"not JSON": 1, "no object": 1, "not text": 1}
    assert place.record()["shards"]["00000_tokens"]["steps"][0]["in"] == 12


@pytest.mark.parametrize("ending", ["parquet", "csv", "arrow"])
def test_other_columns_are_metadata_in_every_format(place: Workplace, ending: str) -> None:
    table = pa.table({"id": ["x", "y"], "text": ["a 1", "b 3"], "url": ["http://a", "http://b"]})
    file = place.data / f"f.{ending}"
    if ending == "parquet":
        pq.write_table(table, file)
    elif ending == "csv":
        file.write_text('id,text,url\nx,a 1,http://a\ny,"b 3",http://b\n')
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    place.write_paths([f"f.{ending}", "1.jsonl"])
    place.run([{"lambda": {"filter_function": f"{HERE}.is_even"}}])
    found = [(each["id"], each["text"], each["metadata"]) for each in place.dropped()][:2]
    assert found == [("x", "a 1", {"url": "http://a"}), ("y", "b 3", {"url": "http://b"})]


class Spaces(WordTokenizer):  # type: ignore[misc]
    """Stands in for spaCy, which is no package of ours."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^.]+\.?", text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"[^.]+\.?", text)]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    if word_tokenizers_missing():
        monkeypatch.setattr(word_tokenizers, "load_word_tokenizer", lambda language: Spaces())


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stand in for the files that two filters download."""
    bad, frequencies = tmp_path / "downloads/bad", tmp_path / "downloads/unigram_freq.csv"
    bad.parent.mkdir()
    bad.write_text("lorem\nhave with\n")
    frequencies.write_text("word,count\nthe,100\nof,50\nand,40\nto,30\n")
    monkeypatch.setattr(c4_filters, "cached_asset_path_or_download", lambda *_, **__: str(bad))
    monkeypatch.setattr(unigram_log_probs, "cached_assets_path", lambda **_: str(bad.parent))


@pytest.fixture
def few_urls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stand in for the lists of the filter of URLs: it reads millions of domains for each shard."""
    lists = {"domains": {"site-5.example"}, "soft_banned_words.txt": {"nobody"}}
    monkeypatch.setattr(url_filter, "cached_assets_path", lambda **_: str(tmp_path))
    monkeypatch.setattr(url_filter, "safely_create_file", lambda *_: None)
    monkeypatch.setattr(url_filter, "get_list", lambda _, name, extra, **__: lists.get(name, set()) | set(extra))


def word_tokenizers_missing() -> bool:
    try:
        word_tokenizers.load_word_tokenizer("en")
    except ImportError:
        return True
    return False


def pages(file: int) -> list[dict[str, Any]]:
    """Pages of the web in small: each rule of the filters below drops some and keeps some."""
    generator = random.Random(file)
    common = ["the", "be", "to", "of", "and", "that", "have", "with", "in", "a", "it", "on", "as", "at", "this"]
    rare = ["".join(generator.choices("abcdefghijklmnoprstuvwy", k=generator.randint(2, 9))) for _ in range(3000)]
    found = []
    for row in range(40):
        lengths = generator.choices(((8, 20), (45, 60))[row % 2], k=generator.randint(3, 12))
        chosen = [[generator.choice((common, rare)[generator.random() < 0.6]) for _ in range(n)] for n in lengths]
        lines = [" ".join(words).capitalize() + "." for words in chosen]
        lines += [["Short.", "no end here", lines[0], f"- {lines[1]}"][row % 4]] * (row % 7)
        lines += [f"Write to me{row}@company.com or me.too@company.org, we live at 8.8.8.{row}, thank you."]
        lines += [["lorem ipsum dolor sit.", "{ code }", "A good line of text.", "# # # # # #."][row % 4]] * (row % 3)
        lines = lines if row % 9 else ["Too short a page."]
        found.append({"text": "\n".join(lines), "url": f"http://site-{row}.example/page"})
    return found


STEPS: list[Any] = [
    "gopher_quality",
    "gopher_repetition",
    "c4_quality",
    {"c4_quality": {"min_num_sentences": 9, "filter_curly_bracket": False}},
    "fine_web_quality",
    "c4_paragraph",
    "pii",
    {"pii": {"email_replacement": ["a@b.c", "d@e.f", "g@h.i"]}},
    "symbol_lines",
    {"regex": {"regex_exp": "the (of|and)"}},
    {"lambda": {"filter_function": f"{HERE}.has_no_code"}},
    "c4_bad_words",
    {"unigram_log_prob": {"logprobs_threshold": -18.6}},
]
URL = {"url": {"extra_domains": ["site-3.example"], "banned_subwords": ["e7"], "soft_word_threshold": 1}}
if all(map(importlib.util.find_spec, ("tldextract", "ahocorasick", "fasteners"))):
    STEPS.append(URL)


def has_no_code(document: Document) -> bool:
    return "{" not in document.text


@pytest.mark.parametrize("steps", [*([step] for step in STEPS), STEPS[:3], [STEPS[7], STEPS[2], STEPS[0]]], ids=str)
@pytest.mark.usefixtures("words", "downloads", "few_urls")
@pytest.mark.filterwarnings("ignore:The 'registered_domain' property")
def test_the_documents_are_those_of_datatroves_own_executor(tmp_path: Path, steps: list[Any]) -> None:
    compare_with_executor(tmp_path, steps)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The 'registered_domain' property")
def test_the_filter_of_urls_has_its_own_lists(tmp_path: Path) -> None:
    assert URL in STEPS, "its packages are of the extra dev"
    compare_with_executor(tmp_path, [URL])


def compare_with_executor(tmp_path: Path, steps: list[Any]) -> None:
    place = Workplace(tmp_path, [pages(file) for file in range(3)])
    place.run(steps)
    wrote = tmp_path / "theirs"
    theirs = [JsonlReader(str(place.data)), *map(build_step, steps), JsonlWriter(str(wrote), compression=None)]
    LocalPipelineExecutor(theirs, tasks=3, workers=1, logging_dir=str(tmp_path / "logs")).run()
    kept = [json.loads(line) for file in sorted(wrote.iterdir()) for line in file.read_text().splitlines()]
    assert place.texts() == [document["text"] for document in kept]
    assert 0 < len(kept) < 120 or "pii" in str(steps) or "symbol" in str(steps)
    identities = {document["id"] for document in kept} | {each["id"] for each in place.dropped()}
    assert len(identities) == len(kept) + len(place.dropped()) == 120
    counts = [task["steps"] for task in place.record()["shards"].values()]
    assert sum(steps[-1]["out"] for steps in counts) == len(kept)


def yaml(folder: Path, pipeline: str) -> Path:
    file = folder / "data.yaml"
    file.write_text(
        f"tokenizer: {folder}/tok\ntokenizer_name: t\ndataset_name: d\nmetadata_folder: {folder}/meta\n"
        f"output_folder: {folder}/tokens\nlogs: {folder}/logs\nexecutor: local\ntasks: 3\nworkers: 1\n"
        f"pipeline:\n{pipeline}"
    )
    return file


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("- gopher_qualty", "there is no step 'gopher_qualty'; did you mean 'gopher_quality' or 'c4_quality'?"),
        ("- sampler: {rat: 0.5}", "unknown argument; did you mean 'rate'?"),
        ("- sampler: {rate: often}", "pipeline.0.sampler.rate: Input should be a valid number, not 'often'"),
        ("- sampler: {rate: '0.5'}", "pipeline.0.sampler.rate: Input should be a valid number, not '0.5'"),
        ("- sampler: {exclusion_writer: x}", "dropped documents go to the folder `exclusions`"),
        ("- regex", "missing a required argument: 'regex_exp'"),
        ("- lambda: {filter_function: no.such_function}", "no.such_function cannot be imported"),
        ("- my.Step", "my.Step cannot be imported"),
        ("- json.JSONDecoder", "this is no class of datatrove's PipelineStep"),
        ("- datatrove.pipeline.dedup.MinhashDedupSignature", "one of datatrove's dedup, which are no steps of a shard"),
        ("- datatrove.pipeline.stats.DocStats", "one of datatrove's stats"),
        ("- {sampler: {}, pii: {}}", "a step is NAME, or NAME: {ARGUMENT: VALUE}"),
        ("- ftfy", "Please install `ftfy` to use FTFYFormatter"),
        ("- gopher_quality: {language: klingon}", "Language 'klingon' doesn't have a tokenizer"),
        pytest.param(
            "- gopher_quality",
            "Please install `spacy` to use en word tokenizer",
            marks=pytest.mark.skipif(not word_tokenizers_missing(), reason="spaCy is installed"),
        ),
    ],
)
def test_a_wrong_step_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_tokenization_config(yaml(tmp_path, f"  {line}\n"))
    assert str(raised.value.where).endswith("data.yaml:11")


def test_a_step_is_checked_without_a_file() -> None:
    def nowhere(location: tuple[str, ...]) -> None:
        return None

    check_steps(["sampler", {"pii": {"email_replacement": ["a", "b"]}}, {"sampler": None}], nowhere)
    with pytest.raises(ConfigError, match=r"pipeline\.1\.pii\.remove_mails: .*remove_emails"):
        check_steps(["sampler", {"pii": {"remove_mails": True}}], nowhere)


def test_a_data_set_through_its_yaml(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_dumps(place.data, place.folder / "meta", n_dumps=1)
    config = yaml(place.folder, f"  - lambda: {{filter_function: {HERE}.is_even}}\n")
    assert main(["dumps", "submit", str(config), "--executor", "local"]) == 0
    assert "dump 0 documents: lambda 30 in, 15 out" in status_table(read_status(place.folder / "meta"))
    capsys.readouterr()
    dump = place.folder / "tokens/t/d/dump-0"
    assert main(["data", "why", "1.jsonl/3", str(dump)]) == 0
    said = "1.jsonl/3: dropped by lambda: dropped (row 3 of 1.jsonl, shard 00001_tokens)\n"
    assert capsys.readouterr().out == said
    assert main(["data", "why", "1.jsonl/2", str(dump)]) == 1
    assert "1.jsonl/2 is not among the 15 dropped documents" in capsys.readouterr().out
    assert main(["dumps", "verify", "--workers", "1", str(place.folder / "meta")]) == 0
    (full,) = {each.note or each.fault for each in compare_with_source([f"{dump}/00001_tokens"], workers=1, full=True)}
    assert full is None


def test_without_steps_nothing_of_datatrove_is_loaded_and_no_folder_is_made(place: Workplace) -> None:
    program = f"""
import sys
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
tokenize_paths_file(TokenizeOptions(tokenizer={str(place.tokenizer)!r}, workers=1), output_folder="out",
    dataset="data", paths_file="paths")
assert not [name for name in sys.modules if name.startswith("datatrove")]
"""
    subprocess.run([sys.executable, "-c", program], cwd=place.folder, check=True, env={"PYTHONPATH": str(ROOT)})
    assert not (place.folder / "out/exclusions").exists()
    assert "pipeline" not in place.record()["settings"]


def die_at(call: int, place: Workplace, steps: list[Any], out: str, form: str) -> None:
    """Run, and be killed at this call of a function that changes files."""
    kill = KillAtCall(call)
    kill.count(os, "replace", "fsync", "unlink")
    kill.count(gzip.GzipFile, "write", "close")
    place.run(steps, out, exclusions=form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl.gz", "parquet"])
def test_a_kill_at_any_change_of_a_file_leaves_the_bytes_of_an_undisturbed_run(tmp_path: Path, form: str) -> None:
    place = Workplace(tmp_path, [[f"document {file} {row}" for row in range(6)] for file in range(2)])
    steps: list[Any] = [{"sampler": {"rate": 0.7}}, {"lambda": {"filter_function": f"{HERE}.keeps_half"}}, "pii"]
    place.run(steps, "undisturbed", exclusions=form)
    whole = place.bytes("undisturbed")
    codes = []
    for call in range(1, 200, 11):
        killed = multiprocessing.get_context("fork").Process(
            target=die_at, args=(call, place, steps, f"out{call}", form)
        )
        killed.start()
        killed.join(60)
        codes.append(killed.exitcode)
        if not killed.exitcode:
            break
        place.run(steps, f"out{call}", exclusions=form)
        assert place.bytes(f"out{call}") == whole, call
        assert not [*(tmp_path / f"out{call}").rglob("*tmp*")], call
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 5
