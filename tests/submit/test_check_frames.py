"""Tokens that begin and end documents stand there once: the check compares windows with the records of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.data import DocumentWindowSection
from relayrun.control.rundir.run import Run
from relayrun.submit.check.data import check_data
from relayrun.submit.check.findings import Findings
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.streams.samples import LaneSamples, SampleShape
from tests.shard_records import write_folder_record
from tests.workspace import Workspace

BEST = {"window": 32, "overlap": 4, "bos": 5, "eos": True, "packing": "best_fit"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.make(tmp_path)


def warnings(workspace: Workspace, **data: Any) -> list[str]:
    config = resolve.load_run_config(workspace.config("run", data={"allow_other_tokenizer": True} | data))
    assert isinstance(config, RunConfig)
    findings = Findings(config)
    check_data(config, Run(workspace.folder / "run"), findings)
    return [finding.words for finding in findings.all if finding.name == "data.frames"]


def record(workspace: Workspace, folder: str = "data", **settings: Any) -> None:
    shards = {path.stem: {} for path in (workspace.folder / folder).glob("*.bin")}
    write_folder_record(workspace.folder / folder, shards, settings=settings)


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"eos": 0}, {}, "document_window.eos puts the token 0 behind documents that end with it already"),
        ({"eos": 0}, {"eos": 0}, "document_window.eos puts the token 0 behind"),
        ({"eos": 0}, {"drop_eod": True}, None),
        ({"eos": 0}, {"eos": 7}, None),
        ({"eos": 0}, {"eos": False}, None),
        ({"eos": 0, "bos": 5}, {"drop_eod": True}, "document_window.bos puts the token 5 before documents that begin"),
        ({"eos": 0, "bos": 6}, {"drop_eod": True}, None),
        ({"eos": None}, {}, None),
        ({"eos": None}, {"drop_eod": True}, "drop_eod asks for a token at the end of each document"),
    ],
)
def test_a_token_that_would_stand_twice_or_nowhere_is_a_warning(
    workspace: Workspace, settings: dict[str, Any], changes: dict[str, Any], words: str | None
) -> None:
    record(workspace, **settings)
    found = warnings(workspace, order="document-window", document_window=BEST | changes)
    assert [line.split(words)[0] for line in found if words] == (["data set 'train': "] if words else [])
    assert bool(found) == (words is not None)


def test_documents_without_an_end_are_a_warning_where_they_follow_each_other(workspace: Workspace) -> None:
    assert warnings(workspace) == []  # nothing is known
    record(workspace, eos=0)
    assert warnings(workspace) == []
    record(workspace, eos=None)
    (words,) = warnings(workspace)
    assert words.startswith("data set 'train': no token ends the documents")
    other = Workspace.make(workspace.folder / "other", seed=2)
    record(other, eos=None)
    merge_shards(find_prefixes([other.folder / "data"]), workspace.folder / "merged")
    (workspace.folder / "held").mkdir()
    for file in workspace.folder.glob("merged.*"):  # the record of a merged shard says it, too
        file.rename(workspace.folder / "held" / file.name)
    record(workspace, eos=0)
    found = warnings(workspace, datasets=[str(workspace.folder / name) for name in ("data", "held")])
    assert "some documents begin or end with another token than the others" in found[0]


def test_a_window_of_a_stream_ends_with_one_token() -> None:
    settings = DocumentWindowSection(window=8, eos=True, packing="split")
    shape = SampleShape.from_settings(settings, seq_length=8, eod=3, vocabulary_size=100, where="x")
    samples = LaneSamples(shape)
    samples.add(np.arange(10, 16, dtype=np.uint32), np.array([2, 4]), np.array([0, 1]), last=True)
    assert samples.row(0).tokens.tolist()[:8] == [10, 11, 3, 12, 13, 14, 15, 3]
