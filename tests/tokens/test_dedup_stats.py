"""`stats` of `relayrun dumps dedup`: the files of datatrove's own executor and merger, also after kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.stats import DocStats, LineStats, StatsMerger, WordStats

from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.tokens.curate.dedup_jobs import deduplicate
from relayrun.tokens.tokenize.dump_status import dedup_status
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from tests.killed_calls import KillAtCall
from tests.tokens.test_dedup import HERE, Place, Words, documents

GROUPS = ["summary", "histogram", "fqdn", "suffix"]
STATS: list[Any] = [
    {"doc": {"groups_to_compute": GROUPS, "top_k_config": {"top_k_groups": ["fqdn"], "top_k": 3}}},
    {"LineStats": {"groups_to_compute": ["summary"], "max_k_chars_per_line_tresholds": [5]}},
    {"datatrove.pipeline.stats.WordStats": {"language": f"{HERE}.Words", "groups_to_compute": ["histogram"]}},
]
NONE: dict[str, Any] = {"exact": False, "minhash": None, "stats": STATS}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    rows = documents()
    for number, row in enumerate(rows):
        row["url"] = f"https://www.{'abcdefg'[number % 7]}.co.uk/{number}"
    return Place(tmp_path, rows)


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def theirs(place: Place, source: str, tasks: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the files of datatrove's statistics of a folder, and those of its merger."""
    from datatrove.pipeline.stats.config import TopKConfig

    parts, merged = place.folder / "parts", place.folder / "merged"
    blocks = [
        JsonlReader(source, add_file_path=False, recursive=False),
        DocStats(str(parts), GROUPS, top_k_config=TopKConfig(["fqdn"], 3)),
        LineStats(str(parts), [5], groups_to_compute=["summary"]),
        WordStats(str(parts), language=Words(), groups_to_compute=["histogram"]),
    ]
    for number, steps, name in ((tasks, blocks, "a"), (1, [StatsMerger(str(parts), str(merged))], "b")):
        LocalPipelineExecutor(steps, tasks=number, workers=1, logging_dir=str(place.folder / f"logs-{name}")).run()
    return files(parts), files(merged)


@pytest.mark.parametrize("given", [NONE, {"stats": STATS}], ids=["all documents", "deduplicated"])
def test_the_statistics_are_those_of_datatroves_own_executor(place: Place, given: dict[str, Any]) -> None:
    deduplicate(place.config(workers=2, **given), wait=True)
    parts, merged = theirs(place, str(place.folder / "out" if given is not NONE else place.data), 3)
    assert files(place.folder / "out/_dedup/stats") == parts
    assert files(place.folder / "out/_stats") == merged
    assert {"fqdn/length/00002.json", "summary/n_lines/00000.json", "histogram/n_words__chars/00001.json"} <= set(parts)
    assert len(json.loads(merged["fqdn/length/metric.json"])) > 3
    number = sum(content.count(b"\n") for content in place.kept().values())
    assert json.loads(merged["summary/length/metric.json"])["summary"]["n"] == number
    assert number == 120 or given is not NONE
    (dump,) = prepare_dumps(place.folder / "out", place.folder / "next", n_dumps=1)
    assert [file.path for file in dump.files] == [f"0000{task}.jsonl.gz" for task in range(3)]
    lines = dedup_status(place.folder / "meta")
    assert {"dedup stats: 3/3 tasks", "dedup merged: 1/1 tasks"} < set(lines)
    assert lines[-1].startswith("dedup is done")


def test_a_lost_file_is_made_again_alone_and_other_statistics_are_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    deduplicate(place.config(**NONE), wait=True)
    whole = files(place.folder / "out")
    (place.folder / "out/_dedup/stats/summary/length/00001.json").write_text("{}")
    (place.folder / "out/_stats/histogram/length/metric.json").unlink()
    capsys.readouterr()
    deduplicate(place.config(**NONE), wait=True)
    assert re.findall(r"stage (\w+: task \d+) done", capsys.readouterr().out) == ["stats: task 1", "merged: task 0"]
    assert {name: content for name, content in files(place.folder / "out").items() if "/records/" not in name} == {
        name: content for name, content in whole.items() if "/records/" not in name
    }
    with pytest.raises(InputError, match="another choice of stats"):
        deduplicate(place.config(**NONE | {"stats": STATS[:2]}), wait=True)


def die_at(call: int, place: Place, out: str) -> None:
    """Deduplicate, and be killed at this call of a function that changes files, from the first file of `stats` on."""
    kill, made = KillAtCall(call), Path.mkdir

    def mkdir(folder: Path, *given: Any, **named: Any) -> None:
        made(folder, *given, **named)
        if folder.parts[-2:] == ("_dedup", "stats") and os.replace is replace:
            kill.count(os, "replace", "fsync", "unlink", "mkdir", "rmdir")

    replace, Path.mkdir = os.replace, mkdir  # type: ignore[method-assign, assignment]
    deduplicate(place.config(out, tasks=2, **NONE), wait=True)


def test_a_kill_in_the_stage_leaves_the_files_of_an_undisturbed_run(place: Place) -> None:
    deduplicate(place.config("undisturbed", tasks=2, **NONE), wait=True)
    names = "_stats", "_dedup/stats"
    whole = [files(place.folder / "undisturbed" / name) for name in names]
    codes: list[int | None] = []
    for call in (2, 130, 300, 100_000):
        killed = multiprocessing.get_context("fork").Process(target=die_at, args=(call, place, f"out{call}"))
        killed.start()
        killed.join(60)
        codes.append(killed.exitcode)
        deduplicate(place.config(f"out{call}", tasks=2, **NONE), wait=True)
        assert [files(place.folder / f"out{call}" / name) for name in names] == whole, call
    assert codes == [-signal.SIGKILL] * 3 + [0]


@pytest.mark.parametrize(
    ("entry", "place_of", "words"),
    [
        ("DocStat", "", "there is no stats 'DocStat'; did you mean 'DocStats'"),
        ("LineStats: {ignore_empty_line: true}", "LineStats.ignore_empty_line", "did you mean 'ignore_empty_lines'"),
        ("LineStats: {ignore_empty_lines: 3}", "LineStats.ignore_empty_lines", "should be a valid boolean, not 3"),
        ("DocStats: {groups_to_compute: [sumary]}", "DocStats.groups_to_compute", "Input should be 'summary'"),
        ("DocStats: {top_k_config: {topk: 3}}", "DocStats.top_k_config", "did you mean 'top_k'"),
        ("DocStats: {output_folder: x}", "DocStats.output_folder", "statistics go to `_stats`"),
        ("WordStats: {language: klingon}", "WordStats", "doesn't have a tokenizer"),
        ("StatsMerger", "", "this is no class of datatrove's BaseStats"),
        ("gopher_quality", "", "there is no stats 'gopher_quality'; known: words_contamination, doc,"),
        ("datatrove.pipeline.filters.LambdaFilter", "", "this is no class of datatrove's BaseStats"),
        ("lang", "lang", "missing a required argument: 'language'"),
        ("ParagraphStats", "ParagraphStats", "this class is given twice, and would write the same files"),
    ],
)
def test_wrong_statistics_are_named_with_their_line(tmp_path: Path, entry: str, place_of: str, words: str) -> None:
    names = ("tokenizer", "tokenizer_name", "dataset_name", "metadata_folder", "output_folder")
    lines = [*(f"{name}: x" for name in names), "dedup:", "  output_folder: x", "  stats:", "    - paragraph"]
    file = tmp_path / "data.yaml"
    file.write_text("\n".join([*lines, f"    - {entry}"]) + "\n")
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load_tokenization_config(file)
    assert str(raised.value.where).endswith("data.yaml:10")
    assert f"dedup.stats.1.{place_of}" in str(raised.value)


def test_an_unknown_setting_of_dedup_has_its_nearest_name(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"dedup\.statistic: unknown setting; did you mean 'stats'"):
        place.config(statistic=["DocStats"])


def test_pipeline_names_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "data.yaml"
    names = ("tokenizer", "tokenizer_name", "dataset_name", "metadata_folder", "output_folder")
    file.write_text("".join(f"{name}: x\n" for name in names) + "pipeline: [datatrove.pipeline.stats.DocStats]\n")
    with pytest.raises(ConfigError, match="one of datatrove's stats, which are no steps") as raised:
        load_tokenization_config(file)
    assert raised.value.hint == "give it in `stats` of `dedup`, a stage of its own"


def test_documents_without_an_address_are_named_with_the_groups_that_need_none(tmp_path: Path) -> None:
    rows = [{"text": f"some text {number}", "id": str(number)} for number in range(6)]
    place = Place(tmp_path, rows)
    with pytest.raises(RelayrunError, match="a document has no 'url' in its metadata"):
        deduplicate(place.config(exact=False, minhash=None, stats=["DocStats"]), wait=True)
    said = dedup_status(tmp_path / "meta")
    assert said[-1].startswith("dedup failed: ")
    assert not any(line.startswith("dedup is done") for line in said)


def test_a_data_set_without_a_document_has_no_statistics(tmp_path: Path) -> None:
    place = Place(tmp_path, [{"text": "x"}] * 4)
    none = ({"lambda": {"filter_function": f"{HERE}.is_long"}},)
    deduplicate(place.config(pipeline=none, **NONE), wait=True)
    assert files(tmp_path / "out/_stats") == {}
