"""What a submit makes of streams: what it says, what it refuses, and what a changed stream becomes."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError, InputError
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture.data_change import AcceptedData, apply_data_change
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.streams import files
from tests.streaming import write
from tests.workspace import Workspace


class Data:
    """A folder of parquet files and one of token shards, and the run as its submits left it."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace.make(folder)
        self.folder = folder
        write(folder / "web", "parquet", [20, 20, 20])
        self.manifest: Manifest | None = None
        self.history: list[RunConfig] = []

    def file(self, *, lanes: int = 8, job: dict[str, Any] | None = None, **source: Any) -> Path:
        """A config whose stream `web` has these settings."""
        web = {"source": "parquet", "path": str(self.folder / "web"), "weight": 1.0} | source
        mixture = {"web": web, "tokens": {"path": str(self.folder / "data"), "weight": 1.0}}
        tokenizer = str(self.folder / "tokenizer.json")
        data = {"tokenizer": tokenizer, "datasets": [], "mixture": mixture, "lanes": lanes}
        return self.workspace.config("run", data=data, job=job or {})

    def submit(self, *, accept: bool = False, **source: Any) -> AcceptedData:
        config = resolve.load_run_config(self.file(**source))
        assert isinstance(config, RunConfig)
        run = self.workspace.run("run")
        if self.manifest is not None:
            run.config.mkdir(parents=True, exist_ok=True)
            run.config_revision(1).touch()
            self.manifest.write(run.manifest)
        found = build_manifest(config, run)
        if self.manifest is None:
            self.manifest, self.history = found, [config]
            return AcceptedData(config=config, manifest=found, notes=[])
        evolved = apply_data_change(
            frozen=self.manifest, history=self.history, found=found, config=config, accept=accept, trained=True
        )
        self.manifest, self.history = evolved.manifest, [evolved.config, *self.history]
        return evolved


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def test_a_manifest_keeps_the_files(data: Data) -> None:
    manifest = data.submit().manifest
    path = data.folder / "manifest.json"
    manifest.write(path)
    assert Manifest.read(path) == manifest
    files = manifest.datasets["web"].files
    assert [file.path for file in files] == [str(data.folder / "web" / f"00{number}.parquet") for number in range(3)]
    assert manifest.datasets["tokens"].files == ()
    assert "files" not in json.loads(path.read_text())["datasets"]["tokens"]
    manifest.verify()
    (data.folder / "web" / "001.parquet").unlink()
    assert manifest.differences(["web"]) == [f"web: {data.folder}/web/001.parquet: missing"]


@pytest.mark.slow
def test_the_check_says_what_is_streamed(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(data.file()), "--json"])
    said = capsys.readouterr().out
    assert "data set 'web': 3 parquet files with" in said
    assert "in 8 lanes" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stream": {"shuffle_buffer": 99}}, "web: stream.shuffle_buffer was 10000, is 99: it would begin anew"),
        ({"stream": {"min_len": 3}}, "web: stream.min_len was 0, is 3: it would begin anew"),
        ({"lanes": 16}, "web: data.lanes was 8, is 16: it would begin anew"),
        ({"stream": {"limit": {"nb_files": 2}}}, "web: stream.limit was None, is {"),
    ],
    ids=str,
)
def test_another_option_is_refused_by_name_or_begins_anew(data: Data, change: dict[str, Any], words: str) -> None:
    data.submit()
    with pytest.raises(InputError) as error:
        data.submit(**change)
    assert words in str(error.value)
    evolved = data.submit(accept=True, **change)
    assert [source.identity(name) for name, source in evolved.config.data.sources.items()] == ["web@2", "tokens"]


def test_what_changes_speed_alone_is_taken(data: Data) -> None:
    data.submit()
    assert data.submit(stream={"nb_prefetch": 3}).notes == []


def test_changed_files_are_refused_by_name(data: Data) -> None:
    data.submit()
    write(data.folder / "web", "parquet", [20, 20, 20, 5])
    with pytest.raises(InputError, match=r"web: file 003\.parquet was added"):
        data.submit()
    (data.folder / "web" / "003.parquet").unlink()
    assert data.submit().notes == []
    write(data.folder / "web", "parquet", [20, 20, 20], first=1)
    with pytest.raises(InputError, match=r"web: file 000\.parquet (was changed|had )"):
        data.submit()


def edited_in_its_middle(path: Path) -> None:
    """Another byte, far from the two ends that the fingerprint is of; the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def long_file(data: Data) -> Path:
    """A file of lines that is longer than its two ends."""
    folder = data.folder / "lines"
    write(folder, "jsonl", [20], extra={row: f"{row} " + "x" * 20_000 for row in range(20)})
    return folder / "000.jsonl"


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_was_edited_in_its_middle_is_refused_or_begins_anew(
    data: Data, long_file: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and its ends are the same."""
    if not whole:  # too large to be hashed at the first submit
        monkeypatch.setattr(files, "MAX_HASHED_BYTES", 1)
    lines: dict[str, Any] = {"source": "jsonl", "path": str(long_file.parent)}
    first = data.submit(**lines).manifest
    original, status = long_file.read_bytes(), long_file.stat()
    assert bool(first.datasets["web"].files[0].content) is whole
    edited_in_its_middle(long_file)
    (difference,) = first.differences(["web"])
    assert "000.jsonl: was changed: its " in difference
    with pytest.raises(InputError, match=r"web: file 000\.jsonl was changed"):
        data.submit(**lines)
    evolved = data.submit(accept=True, **lines)
    assert "web@2" in [source.identity(name) for name, source in evolved.config.data.sources.items()]
    assert data.submit(**lines).notes == []
    long_file.write_bytes(original)
    os.utime(long_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match="has the files of its edition 1 again"):
        data.submit(**lines)


def test_another_time_alone_is_no_change_where_the_content_is_known(data: Data, long_file: Path) -> None:
    lines: dict[str, Any] = {"source": "jsonl", "path": str(long_file.parent)}
    first = data.submit(**lines).manifest
    os.utime(long_file, (1e9, 1e9))
    assert first.differences(["web"]) == []
    again = data.submit(**lines)
    assert again.notes == []
    assert again.manifest.datasets["web"].files[0].changed == 10**18


def test_another_time_alone_is_refused_with_its_remedy_where_the_content_is_not_known(
    data: Data, long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_HASHED_BYTES", 1)
    lines: dict[str, Any] = {"source": "jsonl", "path": str(long_file.parent)}
    os.utime(long_file, ns=(10**18, 10**18 + 5))
    data.submit(**lines)
    os.utime(long_file, (2e9, 2e9))
    with pytest.raises(InputError, match=r"touch -d @1000000000\.000000005 FILE"):
        data.submit(**lines)
    subprocess.run(["touch", "-d", "@1000000000.000000005", long_file], check=True)
    assert data.submit(**lines).notes == []


def test_a_store_may_tell_no_times(data: Data, long_file: Path) -> None:
    lines: dict[str, Any] = {"source": "jsonl", "path": str(long_file.parent)}
    data.submit(**lines)
    assert data.manifest is not None
    web = data.manifest.datasets["web"]
    untimed = replace(web, files=tuple(replace(file, changed=0, content="") for file in web.files))
    data.manifest = replace(data.manifest, datasets=data.manifest.datasets | {"web": untimed})
    os.utime(long_file, (1e9, 1e9))
    assert data.manifest.differences(["web"]) == []
    assert data.submit(**lines).manifest.datasets["web"].files[0].changed == 10**18


def test_a_file_in_two_streams_is_refused(data: Data) -> None:
    values = resolve.load_run_config(data.file())
    assert isinstance(values, RunConfig)
    web = values.data.mixture["web"]
    both = values.data.model_copy(update={"mixture": {"web": web, "again": web}})
    with pytest.raises(InputError, match="its text also stands in"):
        build_manifest(values.model_copy(update={"data": both}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lanes": 9}, "data.lanes 9 is no multiple of the data-parallel size 2"),
        ({"order": "a:b"}, "source: parquet is read with order: window or document-window, not a:b"),
        ({"source": "tokens", "stream": {}}, "stream belongs to source: parquet, jsonl or arrow"),
        ({"source": "arrow", "stream": {"filters": "a == 1"}}, "stream.filters needs source: parquet or jsonl"),
        ({"source": "jsonl", "stream": {"extra_columns": ["a"], "map": "a:b"}}, "extra_columns needs source: parquet"),
        ({"stream": {"on_error": "skip"}}, "on_error"),
        ({"stream": {"filters": "a == "}}, "'a == ' is no condition"),
        ({"stream": {"min_len": 5, "max_len": 4}}, "stream.max_len 4 is below stream.min_len 5"),
        ({"stream": {"limit": {"nb_files": 1, "nb_rows": 1}}}, "limit the same data set"),
        ({"stream": {"fragment_shuffle_window": -2}}, "fragment_shuffle_window"),
        ({"stream": {"shuffle": 3}}, "shuffle"),
        ({"options": {"a": 1}}, "takes stream, and no options"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_submission(data: Data, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve.load_run_config(data.file(**settings))
    assert words in str(error.value)


def test_fewer_rows_than_lanes_are_refused_before_submission(data: Data) -> None:
    with pytest.raises(ConfigError, match=r"its 17 rows are fewer than data\.lanes 64"):
        data.submit(lanes=64, stream={"limit": {"nb_rows": 17}})


def test_a_url_stays_as_it_is(data: Data) -> None:
    config = resolve.load_run_config(data.file(path=["hf://datasets/a/b/*.parquet", "web"]))
    assert isinstance(config, RunConfig)
    paths = config.data.mixture["web"].paths
    assert paths[0] == "hf://datasets/a/b/*.parquet"
    assert Path(paths[1]).is_absolute()
