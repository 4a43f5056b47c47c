"""Text that stands twice in training data, by content: in a copy, a merge, a mixture, or raw files read once more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.data import DataSection
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.places import PROJECT_MARKER
from relayrun.submit.check.data import check_data
from relayrun.submit.check.findings import Findings
from relayrun.submit.megatron_lm import command_line
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.shards.manifest import doubled_texts
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import expand_paths
from tests.tokens.test_held_out_text import build, raw, shard, stream
from tests.workspace import Workspace

__all__ = ["raw"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two shards in `t`, a copy, a merge and a mixture of them with repeats, and `other` text."""
    for number in range(2):
        shard(tmp_path / "t" / f"s{number}", number, record=True)
    shard(tmp_path / "other" / "s0", 7, record=True)
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    merge_shards(expand_paths([str(tmp_path / "t")]), tmp_path / "merged" / "m")
    folders = [tmp_path / "t", tmp_path / "other"]
    create_mixture(folders, [0.9, 0.1], tmp_path / "mixture", tokens=900)
    return tmp_path


@pytest.mark.parametrize("beside", ["copy", "merged", "mixture"])
def test_every_command_on_shards_names_text_that_stands_twice(
    data: Path, beside: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert doubled_texts(expand_paths([str(data / "mixture")])) is None  # repeated on purpose
    assert main(["mixture", "prefixes", "-p", f"{data / 't'},{data / beside}"]) == 0
    out, err = capfd.readouterr()
    assert str(data / beside) in out
    assert "warning: text stands twice in the data" in err
    assert f"{data / beside}" in err
    assert f"has text of {data / 't'}" in err
    folders = ["--folders", str(data / "t"), str(data / beside), "--weights", "0.5", "0.5"]
    assert main(["mixture", "create", *folders, "--output", str(data / "new")]) == 1
    assert main(["dumps", "merge", "--input", *folders[1:3], "--output-prefix", str(data / "new")]) == 1
    err = capfd.readouterr().err
    assert "its text also stands in" in err
    assert not (data / "new").exists()
    assert not (data / "new.bin").exists()


@pytest.mark.parametrize("other", ["copy", "merged"])
def test_a_run_is_not_given_equal_tokens_twice(data: Path, other: str) -> None:
    train = {name: expand_paths([str(data / name)]) for name in ("t", other)}
    with pytest.raises(InputError, match="its text also stands in"):
        build(train)
    with pytest.raises(InputError, match="its text also stands in"):
        build({"one": [*train["t"], *train[other]]})
    values = {"tokenizer": "t", "mixture": {name: {"path": str(data / name), "weight": 0.5} for name in train}}
    with pytest.raises(InputError, match="its text also stands in"):
        command_line.data_path_flags(DataSection.model_validate(values))
    build({"one": expand_paths([str(data / "mixture")])})  # repeated on purpose


def test_a_check_warns_of_shards_without_checksums_whose_ends_are_equal(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for folders, level in ((["data"], []), (["data", "copy"], ["warning"])):
        config = resolve.load_run_config(
            workspace.config("run", data={"datasets": [str(tmp_path / f) for f in folders]})
        )
        assert isinstance(config, RunConfig)
        findings = Findings(config)
        check_data(config, Run(tmp_path / "run"), findings)
        found = [finding for finding in findings.all if finding.name == "data.doubled"]
        assert [finding.level for finding in found] == level
        assert not found or "copy/shard0 has text of" in found[0].words


def test_raw_files_that_were_tokenized_and_are_streamed_stand_twice(raw: Path) -> None:
    files = [file for dataset in stream(raw / "text").values() for file in dataset.files]
    assert "0.jsonl has text of" in str(doubled_texts(expand_paths([str(raw / "one")]), files))
    (raw / "apart").mkdir(exist_ok=True)
    (raw / "apart" / "0.jsonl").write_text(json.dumps({"text": "apart from the others"}) + "\n")
    files = [file for dataset in stream(raw / "apart").values() for file in dataset.files]
    assert doubled_texts(expand_paths([str(raw / "one")]), files) is None
    # two shards of one raw file may hold two columns of it
    both = expand_paths([str(raw / "one"), str(raw / "two")])
    assert "has text of" in str(doubled_texts(both, refuse=True))


def test_a_merge_of_a_shard_with_itself_is_refused(data: Path) -> None:
    with pytest.raises(InputError, match="its text also stands in"):
        doubled_texts(expand_paths([str(data / "t"), str(data / "copy")]), refuse=True)


def test_a_mixture_that_a_run_reads_is_replaced_only_if_that_is_meant(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (data / PROJECT_MARKER).touch()
    monkeypatch.chdir(data)
    run, mixture = data / "logs/runs/p/one", data / "mixture"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"prefix": str(data / "mixture2" / "t" / "s0")}))
    folders, weights = [data / "t", data / "other"], [0.9, 0.1]
    create_mixture(folders, weights, mixture, tokens=900)
    (data / "link").symlink_to("mixture")
    (run / "manifest.json").write_text(json.dumps({"prefix": str(mixture / "t" / "s0")}))
    for place in (mixture, data / "link"):
        with pytest.raises(InputError, match="runs read this mixture, and would go on with other data: p/one"):
            create_mixture(folders, weights, place, tokens=1900)
    create_mixture(folders, weights, mixture, tokens=1900, dry_run=True)
    create_mixture(folders, weights, mixture, tokens=1900, replace_used=True)
    assert "replaced, as --replace says: runs read this mixture" in caplog.text
