"""`dumps prepare` on a tree that somebody made who did not know its rules: no file is taken or left out otherwise than
its list of answers says."""

from __future__ import annotations

import fnmatch
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import RelayrunError
from relayrun.tokens.tokenize.dumps import prepare_dumps
from tests.tokens.second_tree import make_second_tree
from tests.tokens.tree_of_files import make_tree

_END = "tokenization finds torn .gz, .bz2 and .zst files"
_SUMS = "checksums are compared when a dump is tokenized"
_TEXT = "files without text are named when jobs are submitted"
KNOWN = {
    "cc-main-2023-14-wet": "records of WARC are read with `reader: warc`",
    "pile-copy-interrupted": _END,
    "archive-with-sha256sums": f"{_END}; {_SUMS}",
    "texts-with-md5": _SUMS,
    "spark-edited-after": _SUMS,
    "dolma-like-attributes": _TEXT,
}
SECOND_KNOWN = {
    "spark-wrong-crc": _SUMS,
    "json-is-an-array": _TEXT,
    "kaggle": _TEXT,
    "error-pages": _TEXT,
    "logs-and-lists": _TEXT,
    "dead-lettered-jobs": _END,
}
"""Data sets that are not right, and why."""


def wrong_files(dataset: Any, metadata: Path, caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    """Prepare a data set; return what is wrong: path, what was done, and the right answers."""
    caplog.clear()
    stopped = ""
    try:
        prepare_dumps(dataset.full(""), metadata, n_dumps=1)
    except RelayrunError as error:
        stopped = str(error)
    text = (metadata / "inventory.jsonl").read_text()
    lines = {line["path"]: line for line in map(json.loads, text.splitlines())}
    sets = [record.getMessage().split(": ")[0] for record in caplog.records if record.levelno >= logging.WARNING]
    wrong = [(".", "stopped", "clean", stopped)] if stopped and not dataset.troubles else []
    for answer in dataset.lines:
        path = answer["path"].removeprefix(f"{dataset.folder}/")
        right = answer["answer"] if isinstance(answer["answer"], list) else [answer["answer"]]
        line = lines.get(path, {"taken": False, "why": "not looked at"})
        if not line["taken"]:
            fits = not {"left out", "named", "refused"}.isdisjoint(right) or (stopped and dataset.troubles)
        elif "same_as" in line or any(fnmatch.fnmatch(path, name) for name in sets):
            fits = "named" in right or "taken" in right
        else:
            fits = "taken" in right
        if not fits:
            wrong.append((path, line.get("why", "taken"), *right))
    return wrong


def judge(tmp_path: Path, caplog: pytest.LogCaptureFixture, datasets: list[Any]) -> dict[str, list[tuple[str, ...]]]:
    caplog.set_level(logging.WARNING)
    found = {each.folder: wrong_files(each, tmp_path / "meta" / each.folder, caplog) for each in datasets}
    (tmp_path / "wrong.json").write_text(json.dumps(found, indent=1))
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_file_of_the_tree_is_taken_or_left_out_as_it_should_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    wrong = judge(tmp_path, caplog, make_tree(tmp_path, seed))
    assert {name: files[:3] for name, files in wrong.items() if name not in KNOWN} == {}
    assert set(KNOWN) <= set(wrong)


FEW = ("card-names-the-test-files", "run-with-checkpoints", "saved-to-disk-flat")


def test_three_data_sets_of_the_tree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert judge(tmp_path, caplog, make_tree(tmp_path, 1, FEW)) == {}


def test_every_file_of_the_second_tree_is_taken_or_left_out_as_it_should_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = judge(tmp_path, caplog, make_second_tree(tmp_path, 1))
    assert {name: files[:3] for name, files in wrong.items() if name not in SECOND_KNOWN} == {}
    assert set(SECOND_KNOWN) <= set(wrong)
