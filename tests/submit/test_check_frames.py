"""Tokens that begin and end documents stand there once: the check compares windows with the records of shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

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
    assert found[-1] == (
        "documents begin or end with other tokens: "
        "data set 'train' (BOS none, EOS 0); data set 'train' (BOS none, EOS none)"
    )


def test_frames_are_compared_over_all_data_sets_and_validation_sets(workspace: Workspace) -> None:
    other = Workspace.make(workspace.folder / "other", seed=2)
    (workspace.folder / "a.jsonl").write_text('{"text": "w1 w2"}\n')
    tokens, held = [str(workspace.folder / "data")], [str(other.folder / "data")]
    a, b = {"path": tokens, "weight": 1}, {"path": held, "weight": 1}
    stream = {"path": str(workspace.folder / "a.jsonl"), "source": "jsonl", "weight": 1}
    window = {"document_window": BEST | {"drop_eod": True}, "order": "document-window"}
    named = "data set 'a' (BOS 5, EOS 0); "
    for mine, others, data, words in (
        (5, None, {"mixture": {"a": a, "b": b}}, "data set 'b' (BOS none, EOS 0)"),
        (5, None, {"mixture": {"a": a}, "validation": {"v": held}}, "validation 'v' (BOS none, EOS 0)"),
        (5, 5, {"mixture": {"a": a, "s": stream}}, "data set 's' (BOS none, EOS 0)"),
        (5, 5, {"mixture": {"a": a, "b": b}, "validation": {"v": held}}, None),
        (None, None, {"mixture": {"a": a, "s": stream}}, None),
        (None, None, {"mixture": {"a": a, "s": stream, "b": b | {"order": "window"}}} | window, "'b' (BOS none"),
        (None, None, {"mixture": {"a": a, "s": stream}, "validation": {"v": held}} | window, None),
        (6, None, {"mixture": {"a": a, "s": stream}, "validation": {"v": held}} | window, None),
    ):
        record(workspace, eos=0, bos=mine)
        record(other, eos=0, bos=others)
        found = warnings(workspace, datasets=[], **data)
        assert len(found) == (words is not None), (data, found)
        assert words is None or (found[0].startswith("documents begin or end") and words in found[0]), found
        assert words is None or named in found[0] or "data set 'a', data set 's' (BOS 5, EOS 0); " in found[0], found


def test_a_tokenizer_that_begins_a_text_wants_documents_that_begin_so(workspace: Workspace) -> None:
    file = workspace.folder / "tokenizer.json"
    plain, template = Tokenizer.from_file(str(file)), Tokenizer.from_file(str(file))
    template.post_processor = processors.TemplateProcessing("w5 $A", "w5 $A w5 $B", [("w5", 5)])
    ends = Tokenizer.from_file(str(file))
    ends.post_processor = processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 0)])
    named = {"bos_token": "w5", "add_bos_token": True}
    words = "the tokenizer begins a text with token 5, and documents of data set 'train' do not begin so"
    for tokenizer, settings, bos, data, told in (
        (plain, {"bos_token": "w5"}, None, {}, []),
        (plain, named, None, {}, [words]),
        (template, {}, None, {}, [words]),
        (template, named, 5, {}, []),
        (template, {}, None, {"order": "document-window", "document_window": BEST | {"drop_eod": True}}, []),
        (ends, {}, None, {}, []),
        (plain, {"add_bos_token": True}, None, {}, []),
    ):
        tokenizer.save(str(file))
        (workspace.folder / "tokenizer_config.json").write_text(json.dumps(settings))
        record(workspace, eos=0, bos=bos)
        assert warnings(workspace, **data) == told


def test_a_window_of_a_stream_ends_with_one_token() -> None:
    settings = DocumentWindowSection(window=8, eos=True, packing="split")
    shape = SampleShape.from_settings(settings, seq_length=8, eod=3, vocabulary_size=100, where="x")
    samples = LaneSamples(shape)
    samples.add(np.arange(10, 16, dtype=np.uint32), np.array([2, 4]), np.array([0, 1]), last=True)
    assert samples.row(0).tokens.tolist()[:8] == [10, 11, 3, 12, 13, 14, 15, 3]
