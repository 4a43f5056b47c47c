"""What a check says of data that are read as text: held-out splits among them, and text that stands twice."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.submit.check.data import check_data
from relayrun.submit.check.findings import CheckFinding, Findings
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.workspace import Workspace


def lines(seed: int, documents: int = 30) -> bytes:
    rng = random.Random(seed)
    texts = (" ".join(f"w{rng.randrange(1, 300)}" for _ in range(40)) for _ in range(documents))
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def found(workspace: Workspace, name: str, mixture: dict[str, Any], **data: Any) -> list[CheckFinding]:
    """The findings of this name for a run on these streams."""
    streams = {key: {"source": "jsonl", "weight": 1} | value for key, value in mixture.items()}
    sections = {"tokenizer": str(workspace.folder / "tokenizer.json"), "mixture": streams, **data}
    file = workspace.config("run", data=sections)
    text = file.read_text().replace(f"  datasets:\n  - {workspace.folder / 'data'}\n", "")
    file.write_text(text)
    config = resolve.load_run_config(file)
    assert isinstance(config, RunConfig)
    findings = Findings(config)
    check_data(config, Run(workspace.folder / "run"), findings)
    return [finding for finding in findings.all if finding.name == name]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.make(tmp_path)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_held_out_text_of_a_stream_is_refused_or_with_a_pattern_named(workspace: Workspace) -> None:
    web = write(workspace.folder / "web", {"train.jsonl": lines(1), "validation/b.jsonl": lines(2)})
    (bad,) = found(workspace, "data.shards", {"a": {"path": str(web)}})
    assert (bad.level, "of a validation set beside other text: validation/b.jsonl" in bad.words) == ("error", True)
    held = f"by their names, files of a validation set are trained on beside others: {web}/validation/b.jsonl"
    for path in (f"{web}/**/*.jsonl", f"{web}/*", [f"{web}/train.jsonl", f"{web}/validation"]):
        (told,) = found(workspace, "data.held_out", {"a": {"path": path}})
        assert (told.level, told.words) == ("warning", held)
    both = {"a": {"path": f"{web}/*/*.jsonl"}, "b": {"path": f"{web}/*.jsonl"}}
    assert [told.words for told in found(workspace, "data.held_out", both)] == [held]
    for path in (f"{web}/train*", f"{web}/validation"):
        assert not found(workspace, "data.held_out", {"a": {"path": path}})


def test_held_out_shards_are_compared_with_the_text_of_a_stream(workspace: Workspace) -> None:
    raw = write(workspace.folder / "raw", {"a.jsonl": lines(1), "b.jsonl": lines(2)})
    packed = write(workspace.folder / "packed", {"x.jsonl.gz": gzip.compress(lines(1)), "y.jsonl": lines(3)})
    (workspace.folder / "paths").write_text("x.jsonl.gz\n")
    options = TokenizeOptions(tokenizer=str(workspace.folder / "tokenizer.json"), workers=1, tasks=1)
    held_out = workspace.folder / "held"
    tokenize_paths_file(options, output_folder=held_out, dataset=packed, paths_file=workspace.folder / "paths")
    for path, level, same in ((raw, "warning", 30), (raw / "b.jsonl", "ok", 0)):
        (told,) = found(workspace, "data.overlap", {"a": {"path": str(path)}}, validation={"v": [str(held_out)]})
        assert (told.level, f"{same} of 30 documents" in told.words) == (level, True), told.words


def test_streams_of_the_same_text_in_other_files_are_named(workspace: Workspace) -> None:
    raw = write(workspace.folder / "raw", {"a.jsonl": lines(1)})
    rows = lines(1).splitlines(keepends=True)
    random.Random(5).shuffle(rows)
    write(workspace.folder / "shuffled", {"0.jsonl": b"".join(rows)})
    write(workspace.folder / "other", {"0.jsonl": lines(4)})
    for other, level in (("shuffled", "warning"), ("other", "ok")):
        mixture = {"a": {"path": str(raw)}, "b": {"path": str(workspace.folder / other)}}
        (told,) = found(workspace, "data.doubled", mixture)
        assert (told.level, "a sample of data set 'b': 30 of 30 documents" in told.words) == (
            level,
            level == "warning",
        ), told.words
