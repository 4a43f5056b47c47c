"""`hf://` against a stand-in for the hub on the loopback: streams, tables and tokenization, through failures.

huggingface_hub reads HF_ENDPOINT when it is imported, so each look is a program of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.tokens.tokenize.encode.tokenizer_files import write_byte_tokenizer
from tests.streaming import write
from tests.tokens.test_hub_download import COMMIT, NAME, DatasetHub
from tests.tokens.test_streams_urls import samples, stream

ROOT = Path(__file__).resolve().parents[2]
URL = f"hf://datasets/{NAME}"
PROGRAM = """
import json, sys
from relayrun.errors import run_main
from relayrun.tokens.stores import urls
from tests.tokens import test_streams_hub
urls.RETRY_PAUSES = (0.0, 0.0, 0.0)
raise SystemExit(run_main(lambda: print(json.dumps(getattr(test_streams_hub, sys.argv[1])(*sys.argv[2:])))))
"""


def streamed(place: str) -> list[str]:
    """The first samples of a stream, in the program."""
    return samples(stream(place, "parquet"))


def answered(place: str) -> list[dict[str, Any]]:
    """The rows that fairseq2's example of the hub asks for, in the program."""
    from relayrun.tokens import streams

    options: dict[str, Any] = {"fragment_shuffle_window": 0, "drop_null": False, "num_parallel_fragments": 4}
    tables = streams.open(place, nb_epochs=1, filters='pc.field("answer") == 0', **options)
    return [row for table in tables for row in table.to_pylist()]


def version(place: str) -> list[Any]:
    """What a submit keeps of a file, in the program."""
    from relayrun.tokens.shards.manifest import TextFileEntry
    from relayrun.tokens.stores import urls
    from relayrun.tokens.streams.files import _frozen

    file = _frozen(TextFileEntry(path=place, size=urls.stat_url(place)[0], fingerprint=""), [], whole=True)
    return [file.size, file.fingerprint, file.changed]


def hashed(place: str) -> str:
    """The hash of a file that is read piece by piece, in the program."""
    from relayrun.tokens.stores import urls

    found = hashlib.sha256()
    with urls.open_input(place) as file:
        while piece := file.read(1_000_000):
            found.update(piece)
    return found.hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DatasetHub]:
    write(tmp_path / "data", "parquet", [40, 30])
    (tmp_path / "data" / "README.md").write_text("of the data set")
    found = DatasetHub({f"data/{path.name}": path.read_bytes() for path in (tmp_path / "data").iterdir()})
    yield found
    found.close()


def run(hub: DatasetHub, *command: str, without: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    hidden = f"import sys; sys.modules[{without!r}] = None\n" if without else ""
    program = ["-c", hidden + PROGRAM] if command[0] in globals() else ["-m", "relayrun.cli"]
    return subprocess.run(
        [sys.executable, *program, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def look(hub: DatasetHub, *command: str) -> Any:
    done = run(hub, *command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stream_from_the_hub_is_that_of_the_files_through_failures(hub: DatasetHub, tmp_path: Path) -> None:
    hub.faults = [None, None, 503, None, "cut"]
    assert look(hub, "streamed", f"{URL}/data/*.parquet") == samples(stream(str(tmp_path / "data"), "parquet"))
    assert hub.faults == []
    assert all(wanted for _, wanted in hub.asked), "ranges alone"


@pytest.mark.long
def test_a_link_that_has_run_out_is_asked_for_again(hub: DatasetHub) -> None:
    hub.files["data/long.jsonl"] = content = np.random.default_rng(1).bytes(20_000_000)
    hub.faults = [None, 401, None, 403]
    assert look(hub, "hashed", f"{URL}/data/long.jsonl") == hashlib.sha256(content).hexdigest()
    assert hub.faults == []
    assert len({wanted for _, wanted in hub.asked}) > 2


@pytest.mark.long
def test_the_example_of_the_hub(hub: DatasetHub) -> None:
    """fairseq2's, with `filters` on the answer; in an order without shuffle."""
    rows = [{"question": f"{number}", "answer": number % 4} for number in range(50)]
    for name, part in (("all/dev-0", rows[:20]), ("all/test-0", rows[20:])):
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(part), sink, row_group_size=7)
        hub.files[f"{name}.parquet"] = sink.getvalue()
    right = [row for row in rows[20:] if row["answer"] == 0]
    for revision in ("", f"@{COMMIT}"):
        assert look(hub, "answered", f"{URL}{revision}/*/test-*.parquet") == right


@pytest.mark.long
def test_shards_from_the_hub_are_those_of_the_files(hub: DatasetHub, tmp_path: Path) -> None:
    """As the docs go: `prepare_dumps` lists the files, a job reads its paths file through raw-dataset-link."""
    tokenizer = str(write_byte_tokenizer(tmp_path / "t"))
    shards = []
    for name, dataset, faults in (("local", str(tmp_path / "data"), []), ("hub", f"{URL}/data", [None, 503])):
        prepared, tokens = tmp_path / name / "prepared", tmp_path / name / "tokens"
        folders = ["--dataset-folder", dataset, "--preprocessing-metadata-folder", str(prepared)]
        done = run(hub, "dumps", "prepare", *folders, "--filter-out", "README")
        assert done.returncode == 0, done.stderr
        hub.faults = [*faults]
        part = ["--dataset", str(prepared / "raw-dataset-link")]
        part += ["--paths-file", str(prepared / "dumps" / "paths_file_0.txt")]
        out = ["--tokenizer-name-or-path", tokenizer, "--output-folder", str(tokens)]
        done = run(hub, "dumps", "tokenize", *part, *out)
        assert done.returncode == 0, done.stderr
        assert hub.faults == []
        files = (file for file in tokens.rglob("*") if file.suffix in (".bin", ".idx"))
        shards.append({file.name: file.read_bytes() for file in files})
    assert shards[0] == shards[1]
    assert len(shards[0]) >= 2


@pytest.mark.parametrize("status", [401, pytest.param(403, marks=pytest.mark.long)])
def test_a_refusal_is_said_at_once(hub: DatasetHub, status: int) -> None:
    hub.faults = [None, None, *[status] * 100]
    done = run(hub, "streamed", f"{URL}/data")
    assert done.returncode == 1
    assert f"error: {URL}/data/00" in done.stderr
    assert "the store refuses this: " in done.stderr
    assert len(hub.faults) > 90, "what is refused is not asked for minutes"


@pytest.mark.long
def test_a_file_that_is_gone_is_named(hub: DatasetHub) -> None:
    hub.faults = [None, None, *[404] * 100]
    done = run(hub, "streamed", f"{URL}/data")
    assert done.returncode == 1
    assert f"error: {URL}/data/00" in done.stderr
    assert "No such file or directory" in done.stderr
    assert len(hub.faults) > 90


@pytest.mark.long
def test_a_file_that_was_changed_in_its_middle_has_another_version(hub: DatasetHub) -> None:
    """The hub tells no time; the number of its content stands for it."""
    hub.files["data/long.parquet"] = content = bytes(200_000)
    first = look(hub, "version", f"{URL}/data/long.parquet")
    assert first == look(hub, "version", f"{URL}/data/long.parquet")
    hub.files["data/long.parquet"] = content[:100_000] + b"x" + content[100_001:]
    now = look(hub, "version", f"{URL}/data/long.parquet")
    assert now[:2] == first[:2]
    assert now[2] != first[2]


def test_what_is_missing_is_named_with_its_remedy(hub: DatasetHub) -> None:
    done = run(hub, "streamed", f"{URL}/data", without="huggingface_hub")
    assert done.returncode == 1
    assert f"error: {URL}/data: " in done.stderr
    assert "pip install huggingface_hub" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(hub, "streamed", "hf://datasets/nobody/nothing")
    assert done.returncode == 1
    assert "error: hf://datasets/nobody/nothing: " in done.stderr
