"""What a person is told: at once, all of it, with the nearest name, and alike everywhere."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest

from relayrun.cli import main
from relayrun.control.rundir import find_runs
from relayrun.errors import MAX_NAMED_ERRORS, InputError, combined_error, did_you_mean, refuse_unwritable, run_main
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.readers.columns import inspect_files
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import expand_paths, find_prefixes
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.tokenize.dump_jobs import prepare_submission
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.encode import tokenizer, tokenizer_files
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.submit.test_submission_refusals import ordinary_user
from tests.tokenization_corpus import train_tokenizer, write_parquet

# --- a tokenizer that does not exist


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code = 200 if self.path.endswith("/org/there") else 503 if self.path.endswith("/org/busy") else 404
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b'{"id": "org/there"}' if code == 200 else b"")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub on this machine that has `org/there`, and `org/busy` behind an error; nothing is copied here."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield address
    server.shutdown()
    thread.join(300)
    server.server_close()


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its retries are what takes a minute."""
    monkeypatch.setattr(tokenizer, "_from_transformers", lambda *_, **__: pytest.fail("transformers was asked"))


def load(name: str | Path) -> None:
    load_tokenizer(TokenizeOptions(tokenizer=str(name)))


@pytest.mark.usefixtures("without_transformers")
def test_a_tokenizer_that_does_not_exist_is_refused_at_once(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer(tmp_path / "tokenizers" / "llama3" / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"tokenizers/lama3: no such tokenizer: .*{endpoint} has none") as caught:
        load("tokenizers/lama3")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"did you mean '{tmp_path}/tokenizers/llama3'?; give a tokenizer.json")
    for typo in (tmp_path / "tokenizers" / "lama3", "./tokenizers/lama3", "a/path/of/four", "~/tokenizers/x"):
        with pytest.raises(InputError, match="there is no such tokenizer file"):
            load(typo)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"does not answer \(.*refused\), and .*cache has no copy"):
        load("org/there")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"the hub is switched off \(HF_HUB_OFFLINE\), and .*cache has no copy"):
        load("org/there")


def test_a_copy_serves_where_the_hub_is_away(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer_files.check_hub("org/there", None) is False
    assert tokenizer_files.check_hub("org/busy", None) is False
    repository = tmp_path / "cache" / "models--org--there"
    train_tokenizer(repository / "snapshots" / "0" / "tokenizer.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert tokenizer_files.check_hub("org/there", str(tmp_path / "cache")) is True


# --- bad files


@pytest.fixture
def dumps(tmp_path: Path) -> TokenizationSettings:
    """A metadata folder of one dump with twelve files."""
    train_tokenizer(tmp_path / "tok" / "tokenizer.json")
    (tmp_path / "data").mkdir()
    for number in range(12):
        write_parquet(tmp_path / "data" / f"{number:02}.parquet", [f"text {number}"])
    prepare_dumps(tmp_path / "data", tmp_path / "meta", n_dumps=1)
    return TokenizationSettings(
        tokenizer=str(tmp_path / "tok"),
        tokenizer_name="tok",
        dataset_name="d",
        metadata_folder=str(tmp_path / "meta"),
        output_folder=str(tmp_path / "out"),
        logs=str(tmp_path / "logs"),
        workers=1,
    )


@pytest.mark.slow
def test_all_bad_files_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    for number in range(20):
        line = b"{\n" if number % 5 else b'{"text": "good"}\n'
        (tmp_path / f"{number:02}.jsonl").write_bytes(b'{"text": "good"}\n' + line)
    (tmp_path / "paths").write_text("".join(f"{number:02}.jsonl\n" for number in range(20)))
    options = TokenizeOptions(tokenizer=str(tmp_path / "tokenizer.json"), workers=1, tasks=2)
    with pytest.raises(InputError) as caught:
        tokenize_paths_file(options, output_folder=tmp_path / "out", dataset=tmp_path, paths_file=tmp_path / "paths")
    lines = str(caught.value).splitlines()
    assert lines[0] == "16 files or tasks failed:"
    assert all(":2: " in line for line in lines[1 : 1 + MAX_NAMED_ERRORS])
    assert lines[1 + MAX_NAMED_ERRORS] == "  and 6 more"
    assert not list((tmp_path / "out").glob("*.bin"))
    for number in (1, 2):
        (tmp_path / f"{number:02}.jsonl").unlink()
    with pytest.raises(InputError, match=r"(?s)2 of 20 files are missing:\n  .*/01.jsonl: .*\n  .*/02.jsonl: "):
        tokenize_paths_file(options, output_folder=tmp_path / "out", dataset=tmp_path, paths_file=tmp_path / "paths")


def test_a_wrong_column_is_found_before_jobs_are_queued(dumps: TokenizationSettings, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)12 files cannot be tokenized:.*11\.parquet|and 2 more") as caught:
        prepare_submission(dumps.model_copy(update={"column": "contents"}))
    assert "no column 'contents'" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert prepare_submission(dumps) == [0]


@pytest.mark.parametrize(
    ("name", "content", "fine"),
    [
        ("a.jsonl", b'{"text": "x"}\n', True),
        ("a.jsonl", b'{"contents": "x"}\n', False),
        ("a.csv", b"id,text\n1,x\n", True),
        ("a.csv", b"id,contents\n1,x\n", False),
        ("a.json", b'[{"text": "x"}]', False),
        ("a.jsonl", b"\n", True),
        ("a.jsonl", b'no JSON\n{"text": "x"}\n', None),
        ("a.jsonl", b"no JSON\n" * 200, False),
        ("a.parquet", b"PAR1", False),
    ],
)
def test_the_beginning_of_each_kind_of_file_is_looked_at(
    dumps: TokenizationSettings, tmp_path: Path, name: str, content: bytes, fine: bool | None
) -> None:
    """None: what `on_error` leaves out is no fault before the jobs start either."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / name).write_bytes(content)
    prepare_dumps(tmp_path / "one", tmp_path / "one-meta", n_dumps=1)
    one = dumps.model_copy(update={"metadata_folder": str(tmp_path / "one-meta")})
    with contextlib.nullcontext() if fine else pytest.raises(InputError, match=rf"/{name}"):
        prepare_submission(one)
    with contextlib.nullcontext() if fine is not False else pytest.raises(InputError, match=rf"/{name}"):
        prepare_submission(one.model_copy(update={"on_error": "skip-line"}))


def test_all_damaged_shards_are_named(tmp_path: Path) -> None:
    prefixes = []
    for number in range(3):
        writer = ShardWriter(tmp_path / f"s{number}", np.uint16)
        writer.add(np.arange(9), [9])
        writer.finish()
        prefixes.append(tmp_path / f"s{number}")
    for number in (0, 2):
        os.truncate(tmp_path / f"s{number}.bin", 4)
    with pytest.raises(InputError, match=r"2 of 3 shards cannot be used:\n  \S+s0.bin: .*\n  \S+s2.bin: "):
        DatasetManifest.build(prefixes)


def test_what_is_wrong_in_several_files_is_said_at_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        ShardWriter(tmp_path / "shards" / name, np.uint16).abort()
        (tmp_path / "shards" / f"{name}.bin").write_bytes(b"")
        (tmp_path / f"{name}.jsonl").symlink_to(tmp_path / "nowhere")
        write_parquet(tmp_path / f"{name}.parquet", ["x"], column="text" if name == "b" else "contents")
    with pytest.raises(InputError, match=r"3 shards are not whole:\n  \S+a.idx: .*\n  \S+b.idx: .*\n  \S+c.idx: "):
        find_prefixes([tmp_path / "shards"])
    with pytest.raises(InputError, match=r"2 paths lead to nothing:\n  \S+/x: .*\n  \S+/y: "):
        expand_paths([f"{tmp_path}/x", f"{tmp_path}/shards", f"{tmp_path}/y"])
    with pytest.raises(InputError, match=r"3 links lead nowhere:\n  \S+a.jsonl: .*\n  \S+b.jsonl: .*\n  \S+c.jsonl: "):
        prepare_dumps(tmp_path, tmp_path / "meta")
    with pytest.raises(InputError, match=r"2 of 3 files cannot be shuffled:\n  \S+a.parquet: .*\n  \S+c.parquet: "):
        inspect_files([(f"{tmp_path}/{name}.parquet", 1) for name in ("a", "b", "c")], "text")


def test_errors_come_together_with_their_hints() -> None:
    one = InputError("is torn", where="a", hint="fetch it")
    assert combined_error([one], "files failed") is one
    both = combined_error([one, InputError("is gone", where="b", hint="fetch it")], "files failed")
    assert str(both) == "2 files failed:\n  a: is torn\n  b: is gone\n  -> fetch it"
    assert did_you_mean("contnts", ["contents", "content", "id"]) == "did you mean 'contents' or 'content'?"
    assert did_you_mean("x", ["contents"]) == ""


# --- an unknown run

COMMANDS = (
    ["status", "{}"],
    ["logs", "{}"],
    ["save", "{}"],
    ["stop", "{}"],
    ["cancel", "{}"],
    ["resume", "{}"],
    ["config", "{}"],
    ["diff", "{}", "{}"],
    ["data", "show", "{}", "--samples", "1"],
    ["data", "ledger", "{}"],
    ["data", "diff", "{}", "{}"],
    ["checkpoint", "verify", "{}"],
    ["export", "hf", "{}", "--output", "/nowhere/x"],
    ["export", "torch", "{}", "--output", "/nowhere/x"],
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """logs/runs with pretrain/llama-8b and pretrain/llama-70b."""
    monkeypatch.setattr(find_runs, "runs_folder", lambda: tmp_path)
    for name in ("llama-8b", "llama-70b"):
        (tmp_path / "pretrain" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "pretrain" / name / "plan.json").write_text(json.dumps({"format": 1}))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_an_unknown_run_is_answered_alike_everywhere(
    runs: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format("pretrain/lama-8b") for part in command]) == 1
    assert capsys.readouterr().err == (
        "error: pretrain/lama-8b: there is no such run\n"
        "  -> did you mean 'pretrain/llama-8b' or 'pretrain/llama-70b'?; give a run directory, or project/name below "
        f"{runs}; see `relayrun status`\n"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama8b", "did you mean 'pretrain/llama-8b'"),
        ("{}/pretrain/llama-80b", "did you mean '{}/pretrain/llama-8b'"),
        ("{}/pretrain/llama-8b/checkpoints", "this path lies in the run {}/pretrain/llama-8b"),
        ("nothing-like-it", "give a run directory"),
    ],
)
def test_the_nearest_run_is_named(runs: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", name.format(runs)]) == 1
    assert f"-> {said.format(runs)}" in capsys.readouterr().err


# --- a place that is closed


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder of this user's, which others may look into."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    place = tmp_path / "theirs"
    place.mkdir(mode=0o755)
    if os.geteuid() != 0:
        place.chmod(0o555)
    return place


def test_who_may_not_write_is_told_whose_folder_it_is(
    closed: Path, dumps: TokenizationSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = ShardWriter(closed.parent / "shards" / "s", np.uint16)
    writer.add(np.arange(9), [9])
    writer.finish()
    mode = "drwxr-xr-x" if os.geteuid() == 0 else "dr-xr-xr-x"
    words = rf"you may not write here: (\S+|it) belongs to \w+, group \w+, mode {mode}\n  -> choose a place of your own"
    shards, place = closed.parent / "shards", closed / "new"
    with ordinary_user():
        with pytest.raises(InputError, match=words):
            refuse_unwritable(place)
        for settings in (
            {"output_folder": str(place)},
            {"logs": str(place)},
            {"metadata_folder": dumps.metadata_folder},
        ):
            metadata = "metadata_folder" in settings
            with pytest.raises(InputError, match="you may not write here: " if metadata else words):
                prepare_submission(dumps.model_copy(update=settings))
        with pytest.raises(InputError, match=words):
            create_mixture([shards], [1.0], place)
        with pytest.raises(InputError, match=words):
            merge_shards([str(shards / "s")], place)

        def write() -> None:
            (closed / "file").write_text("x")

        assert run_main(write) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {closed}/file: Permission denied: {closed} belongs to ")
    assert f"mode {mode}\n  -> choose a place of your own, or let " in said


# --- export

LOOKS = """
import sys
from relayrun.cli import main
for arguments in (
    ["export", "hf", "no/such", "--output", "/tmp"],
    ["export", "torch", "no/such", "--output", "/tmp"],
    ["export", "hf", "no/such", "--output", "x", "--max-shard-size", "5GX"],
    ["import", "hf", "/nowhere", "--output", "x"],
    ["import", "hf", "/nowhere", "--output", "/tmp"],
):
    assert main(arguments) == 1
print("torch" in sys.modules, "transformers" in sys.modules)
"""


@pytest.mark.slow
def test_an_export_looks_before_it_imports_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=600
    )
    assert done.stdout == "False False\n"
    assert [line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith("error")] == [
        "no/such: there is no such run",
        "no/such: there is no such run",
        "--max-shard-size: '5GX' is no size",
        "/nowhere: this is no Hugging Face folder: it has no config.json",
        "/tmp: this exists already",
    ]
