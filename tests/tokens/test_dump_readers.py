"""Readers of datatrove in place of ours, and extractors as steps."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.extractors.base import BaseExtractor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from relayrun.cli import main
from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.tokens.stores.urls import StoreError
from relayrun.tokens.tokenize import step_task
from relayrun.tokens.tokenize.dump_jobs import submit_dumps
from relayrun.tokens.tokenize.dump_status import read_status, status_table
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from relayrun.tokens.tokenize.steps import build_step
from relayrun.tokens.tokenize.verify import compare_with_source
from tests.tokens.test_dump_steps import Workplace, yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = __name__
WARC = {"WarcReader": {"default_metadata": {"crawl": "mine"}}}


class Paragraphs(BaseExtractor):  # type: ignore[misc]
    """The texts of a page's paragraphs: stands in for Trafilatura."""

    def __init__(self, timeout: float = 5, busy: str = "") -> None:
        super().__init__(timeout)
        self.busy = busy

    def extract(self, text: str) -> str:
        while self.busy and self.busy in text:
            """Goes on for ever, as on some pages."""
        found: list[str] = []
        parser = HTMLParser()
        parser.handle_data = lambda data: found.append(data) if parser.rawdata and data.strip() else None  # type: ignore[method-assign]
        parser.feed(text)
        return "\n".join(each for each in found if each.startswith("Paragraph"))


def page(number: int) -> str:
    generator = random.Random(number)
    words = ["river", "stone", "letter", "garden", "winter", "engine", "window", "harbour", "market", "teacher"]
    lines = [
        f"<p>Paragraph {number} {row} " + " ".join(generator.choices(words, k=30)) + ".</p>"
        for row in range(number % 4)
    ]
    head = f"<html><head><title>Page {number}</title></head><body><nav><a href='/'>Home</a></nav><article>"
    return head + "".join(lines) + "</article><footer>(c)</footer></body></html>"


def warc_record(kind: str, body: bytes, **headers: str) -> bytes:
    given = {"WARC-Type": kind, "WARC-Date": "2026-01-01T00:00:00Z", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return gzip.compress(f"WARC/1.0\r\n{lines}\r\n".encode() + body + b"\r\n\r\n")


def write_warc(file: Path, first: int, pages: int) -> None:
    """Write a file of WARC as a crawler does, with requests beside the pages, and pictures among them."""
    for module in ("warcio", "magic", "cchardet"):
        pytest.importorskip(module, exc_type=ImportError)
    records = [warc_record("warcinfo", b"software: a test\r\n", Content_Type="application/warc-fields")]
    for number in range(first, first + pages):
        url, identity = f"http://site-{number}.example/", f"<urn:uuid:{number:032}>"
        kind = "image/png" if number % 10 == 7 else "text/html"
        named = {"WARC_Target_URI": url, "Content_Type": "application/http; msgtype="}
        asked = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        records.append(warc_record("request", asked, **named, WARC_Record_ID=f"{identity}?"))
        said = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
        body = said + page(number).encode("latin-1" if number % 2 else "utf-8")
        named |= {"WARC_Identified_Payload_Type": kind, "WARC_Record_ID": identity}
        records.append(warc_record("response", body, **named))
    file.write_bytes(b"".join(records))


@pytest.fixture
def crawl(tmp_path: Path) -> Workplace:
    place = Workplace(tmp_path, [["not read"]])
    (place.data / "0.jsonl").rename(place.data / "notes.txt")
    for number in range(3):
        write_warc(place.data / f"{number}.warc.gz", 20 * number, 20)
    place.write_paths([f"{number}.warc.gz" for number in range(3)])
    return place


def theirs(place: Workplace, reader: Any, steps: list[Any]) -> list[dict[str, Any]]:
    """Return the documents of datatrove's own executor."""
    wrote = place.folder / "theirs"
    pipeline = [build_step(reader, "reader", str(place.data)), *map(build_step, steps)]
    pipeline[0].glob_pattern = "*.warc.gz"
    executor = LocalPipelineExecutor(
        [*pipeline, JsonlWriter(str(wrote), compression=None)], tasks=3, logging_dir=str(place.folder / "their-logs")
    )
    executor.run()
    return [json.loads(line) for file in sorted(wrote.iterdir()) for line in file.read_text().splitlines()]


def test_pages_of_a_crawl_become_tokens_as_with_datatroves_executor(crawl: Workplace) -> None:
    step = {f"{HERE}.Paragraphs": {"timeout": 20}}
    result = crawl.run([step], reader=WARC)
    kept = theirs(crawl, WARC, [step])
    assert crawl.texts() == [document["text"] for document in kept]
    assert result.documents == len(kept) == 39  # of 60 pages 6 are pictures, and 15 have no paragraph
    counts = [task["steps"][0] for task in crawl.record()["shards"].values()]
    assert sum(each["in"] for each in counts) == 54
    first = crawl.dropped()[0]
    assert first["id"] == f"<urn:uuid:{0:032}>"
    assert (first["file"], first["row"], first["reason"]) == ("0.warc.gz", 0, "dropped")
    assert first["metadata"]["url"] == "http://site-0.example/"
    assert first["metadata"]["crawl"] == "mine"
    reader = crawl.record()["settings"]["reader"]
    assert reader["class"] == "datatrove.pipeline.readers.warc.WarcReader"
    assert {"datatrove", "warcio"} <= reader["versions"].keys()
    (same,) = {
        each.note or each.fault
        for each in compare_with_source([str(crawl.folder / "out/00001_tokens")], workers=1, full=True)
    }
    assert same is None
    with pytest.raises(InputError, match="another choice of reader"):
        crawl.run([step], reader="warc")


def test_trafilatura_gives_datatroves_texts(crawl: Workplace) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    steps: list[Any] = [{"trafilatura": {"timeout": 60}}, {"regex": {"regex_exp": "winter winter"}}]
    crawl.run(steps, reader="WarcReader")
    kept = theirs(crawl, "warc", steps)
    assert crawl.texts() == [document["text"] for document in kept]
    assert "Paragraph" in "".join(crawl.texts())  # of some pages this version of Trafilatura takes little


def test_a_file_that_is_no_warc_is_named_or_left_out(crawl: Workplace) -> None:
    whole = (crawl.data / "1.warc.gz").read_bytes()
    (crawl.data / "1.warc.gz").write_bytes(whole[:-3000])
    (crawl.data / "2.warc.gz").write_bytes(gzip.compress(b'{"text": "json"}\n'))
    with pytest.raises(RelayrunError) as raised:
        crawl.run([f"{HERE}.Paragraphs"], reader="warc", tasks=1)
    assert "1.warc.gz: WarcReader cannot read this file: OSError" in str(raised.value)
    assert "2.warc.gz: WarcReader cannot read this file: ArchiveLoadFailed" in str(raised.value)
    result = crawl.run([f"{HERE}.Paragraphs"], reader="warc", on_error="skip-file")
    assert result.skipped_files == 2
    assert all("Paragraph" in text for text in crawl.texts())
    assert {each["file"] for each in crawl.dropped()} == {"0.warc.gz"}


def test_an_extractor_that_takes_too_long_is_named_or_drops_the_page(place: Workplace) -> None:
    step = {f"{HERE}.Paragraphs": {"timeout": 0.3, "busy": "document 1 3"}}
    rows = [[f"<p>Paragraph document {file} {row}</p>" for row in range(10)] for file in range(3)]
    for name, texts in zip(place.names, rows, strict=True):
        (place.data / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = r"document 1\.jsonl/3 .*ExtractionTimeout: more than 0\.3 seconds of processor time"
    with pytest.raises(RelayrunError, match=words):
        place.run([step])
    assert place.run([step], on_step_error="drop").documents == 29
    assert [each["reason"] for each in place.dropped()] == ["error: ExtractionTimeout"]
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path, [[f"document {file} {row}" for row in range(10)] for file in range(3)])


def test_readers_of_other_formats_see_the_documents_that_ours_see(place: Workplace) -> None:
    steps = [{"lambda": {"filter_function": "tests.tokens.test_dump_steps.is_even"}}]
    place.run(steps, "ours")
    place.run(steps, "theirs", reader="jsonl")
    place.run([], "no steps", reader={"jsonl": {"text_key": "text"}}, batch_documents=3)
    assert place.texts("ours") == place.texts("theirs")
    assert [each["id"] for each in place.dropped("ours")] == [each["id"] for each in place.dropped("theirs")]
    assert len(place.texts("no steps")) == 30


class Adapted(JsonlReader):  # type: ignore[misc]
    """A reader of the user's own."""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("wrc", "there is no reader 'wrc'; did you mean 'warc'?"),
        ("jsonl: {data_folder: x}", "reader.jsonl.data_folder: the dumps say which files are read"),
        ("jsonl: {limit: 5}", "reader.jsonl.limit: the dumps say which files are read, each as a whole"),
        ("jsonl: {text_kee: x}", "unknown argument; did you mean 'text_key'"),
        ("jsonl: {text_key: 5}", "reader.jsonl.text_key: Input should be a valid string, not 5"),
        ("hugging_face_dataset: {dataset: x}", "this is no class of datatrove's BaseDiskReader"),
        ("gopher_quality", "there is no reader 'gopher_quality'"),
        ("[jsonl]", "a step is NAME, or NAME: {ARGUMENT: VALUE}"),
    ],
)
def test_a_wrong_reader_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    file = yaml(tmp_path, "  []\n")
    file.write_text(
        file.read_text().replace("pipeline:\n  []", f"reader: {{{line}}}" if ":" in line else f"reader: {line}")
    )
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_tokenization_config(file)
    assert str(raised.value.where).endswith("data.yaml:10")


def test_a_crawl_through_its_yaml(crawl: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dataset-folder", str(crawl.data), "--preprocessing-metadata-folder", str(crawl.folder / "meta")]
    assert main(["dumps", "prepare", *given, "--ending", ".warc.gz", "--n-dumps", "1"]) == 0
    config = yaml(crawl.folder, f"  - {HERE}.Paragraphs\nreader: warc\n")
    assert main(["dumps", "submit", str(config), "--executor", "local"]) == 0
    assert f"{HERE}.Paragraphs 54 in, 39 out" in status_table(read_status(crawl.folder / "meta"))
    inventory = [json.loads(line) for line in (crawl.folder / "meta/inventory.jsonl").read_text().splitlines()]
    rows = {each["path"]: each.get("rows") for each in inventory}
    assert {name: rows[name] for name in rows if name.endswith(".gz")} == {f"{n}.warc.gz": 18 for n in range(3)}
    capsys.readouterr()
    dump = crawl.folder / "tokens/t/d/dump-0"
    assert main(["data", "why", f"<urn:uuid:{4:032}>", str(dump)]) == 0
    assert "dropped (row 4 of 0.warc.gz" in capsys.readouterr().out
    assert main(["dumps", "verify", "--workers", "1", str(crawl.folder / "meta")]) == 0


def test_a_reader_that_does_not_fit_is_named_before_a_job_begins(crawl: Workplace) -> None:
    prepare_dumps(crawl.data, crawl.folder / "meta", endings=[".WARC.gz"])
    assert DumpsFolder(crawl.folder / "meta").pending() == [0]
    config = yaml(crawl.folder, "  []\nreader: parquet\n")
    with pytest.raises(InputError, match=r"[012]\.warc\.gz: ParquetReader cannot read this file"):
        submit_dumps(load_tokenization_config(config))
    assert not (crawl.folder / "tokens/t/d/dump-0/tokenization.json").exists()


def test_files_with_endings_of_their_own_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayrun.tokens.readers.deal_files.SMALLEST_RANGE", 100)
    place = Workplace(tmp_path, [])
    line = json.dumps({"text": "a line of text"}).encode() + b"\n"
    (tmp_path / "data/large.jsonl.gz").write_bytes(gzip.compress(line * 9) * 40)
    (tmp_path / "data/small.jsonl.gz").write_bytes(gzip.compress(line))
    cut = prepare_dumps(tmp_path / "data", tmp_path / "cut", n_dumps=3)
    whole = prepare_dumps(tmp_path / "data", tmp_path / "whole", n_dumps=3, endings=[".jsonl.gz"])
    assert len(cut) == 3
    assert [[file.path for file in dump.files] for dump in whole] == [["large.jsonl.gz"], ["small.jsonl.gz"]]
    place.write_paths([file.path for file in cut[1].files])
    with pytest.raises(InputError, match="a reader of datatrove reads whole files, and this is a range"):
        place.run([], reader="jsonl")


def killed_runs(place: Workplace, seed: int) -> Iterator[int]:
    """Run in a process that is killed at random moments until it ends by itself; yield each exit code."""
    generator = random.Random(seed)
    program = f"""
from pathlib import Path
from tests.tokens.test_dump_readers import HERE, WARC
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
tokenize_paths_file(TokenizeOptions(tokenizer={str(place.tokenizer)!r}, workers=1, tasks=3, reader=WARC,
    pipeline=("{HERE}.Paragraphs", {{"sampler": {{"rate": 0.7}}}})), output_folder={str(place.folder / "killed")!r},
    dataset={str(place.data)!r}, paths_file={str(place.folder / "paths")!r})
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = None
    while code != 0:
        with subprocess.Popen([sys.executable, "-c", program], cwd=place.folder, env=environment) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=generator.uniform(1, 6))
            process.kill()
            code = process.wait()
        yield code


@pytest.mark.long
def test_a_crawl_killed_at_random_moments_gives_the_same_bytes(crawl: Workplace) -> None:
    crawl.run([f"{HERE}.Paragraphs", {"sampler": {"rate": 0.7}}], reader=WARC)
    codes = list(killed_runs(crawl, 1))
    assert set(codes) <= {0, -signal.SIGKILL}
    assert crawl.bytes("killed") == crawl.bytes("out")


def test_the_command_of_one_dump_takes_the_steps_of_a_yaml(
    crawl: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml(crawl.folder, f"  - {HERE}.Paragraphs\nreader: warc\n")
    given = ["--dataset", str(crawl.data), "--paths-file", str(crawl.folder / "paths"), "--steps", str(config)]
    given += ["--output-folder", str(crawl.folder / "out"), "--tokenizer-name-or-path", str(crawl.tokenizer)]
    assert main(["dumps", "tokenize", *given, "--n-workers", "1"]) == 0
    assert "39 documents" in capsys.readouterr().out
    assert all(text.startswith("Paragraph") for text in crawl.texts())


def test_a_store_that_does_not_answer_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(path: str) -> Any:
        raise StoreError("the store does not answer", where=path)

    monkeypatch.setattr(step_task, "build_step", lambda *_, **__: SimpleNamespace(read_file=lambda _: iter([])))
    monkeypatch.setattr(step_task, "open_input", silent)
    options = SimpleNamespace(reader="warc", batch_bytes=1000)
    with pytest.raises(StoreError):
        [*step_task.read_texts(options, "s3://bucket", "a.warc.gz")]  # type: ignore[arg-type]
