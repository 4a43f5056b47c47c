"""A shuffle by several tasks gives the bytes of the one-process run, also after kills."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.shuffle import buckets, multi_node, reshard
from relayrun.tokens.shuffle.multi_node import ReshardTask
from relayrun.tokens.shuffle.reshard import ReshardOptions

STAGES = ("begin", "scatter", "measure", "write", "finish")
ROWS = 3000


class Killed(BaseException):
    """As a SIGKILL: nothing is cleaned up behind it by those who know of it."""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReshardOptions:
    for name, value in (("_BASE", 0), ("_THREAD", 0), ("_PAGES", 0), ("_LEAST", 4), ("_GROUP_COPIES", 0)):
        monkeypatch.setattr(reshard, name, value)
    data = tmp_path / "data"
    data.mkdir()
    for number in range(6):
        texts = [f"{number}-{row}-" + "x" * (row % 50) for row in range(500)]
        pq.write_table(pa.table({"text": texts, "id": list(range(500))}), data / f"{number}.parquet")
    return ReshardOptions(
        dataset_folder=str(data),
        output=tmp_path / "out/shuffled",
        temp_dir=tmp_path / "temp",
        seed=3,
        file_size=10_000,
        row_group_size=64,
        memory_limit=60_000,
    )


def expected(options: ReshardOptions, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "temp").mkdir(exist_ok=True)
    reshard.reshard(reshard.replace(options, output=tmp_path / "expected", memory_limit=1 << 40))
    return contents(tmp_path / "expected")


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def run(options: ReshardOptions, tasks: int, stages: tuple[str, ...] = STAGES) -> int | None:
    """All tasks of a stage, one after the other in any order, then the next stage."""
    rows = None
    for stage in stages:
        found = [
            ReshardTask(options, task=task, tasks=tasks).run(stage)
            for task in random.Random(stage).sample(range(tasks), tasks)
        ]
        rows = next((each for each in found if each is not None), None)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "threads", "memory"), [(1, 1, 60_000), (3, 2, 30_000), (5, 1, 400_000), (11, 3, 99_000)]
)
def test_any_number_of_tasks_gives_the_bytes_of_one_process(
    options: ReshardOptions, tmp_path: Path, tasks: int, threads: int, memory: int
) -> None:
    several = reshard.replace(options, threads=threads, memory_limit=memory)
    assert run(several, tasks) == ROWS
    assert (options.output / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert len(contents(options.output)) > 5
    assert contents(options.output) == expected(options, tmp_path)
    assert [entry.name for entry in options.output.parent.iterdir()] == ["shuffled"]
    assert not list((tmp_path / "temp").iterdir())


def test_a_job_that_would_stop_is_not_queued(
    options: ReshardOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check(**changes: Any) -> None:
        ReshardTask(reshard.replace(options, **changes), task=0, tasks=2).check()

    check()
    with pytest.raises(InputError, match="no column 'content'"):
        check(column="content")
    with pytest.raises(InputError, match="no such"):
        check(dataset_folder=str(tmp_path / "date"))
    monkeypatch.setattr(multi_node, "free_space", lambda _: 1000)
    with pytest.raises(InputError, match=r"--temp-dir: the rows take \S+ GB unpacked, and 0\.0 GB are free"):
        check()
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.jsonl").write_text('{"text": "x"}\n' * 200)
    check(dataset_folder=str(lines))
    assert "GB are free" in caplog.text  # an estimate is a warning
    (lines / "b.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(InputError, match=r"b\.jsonl"):
        check(dataset_folder=str(lines))
    assert not (tmp_path / "temp").exists()
    assert not (tmp_path / "out").exists()


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Die in this call of the function."""
    function: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (buckets, "_row_bins", 3),
        (buckets, "_row_bins", 10),
        (buckets.np, "savez", 4),
        (buckets.np, "save", 1),
        (buckets, "narrow_table", 20),
        (buckets.np, "save", 6),
        (multi_node, "write_json", 1),
        (reshard, "draw_lengths", 1),
        (multi_node, "rename_no_replace", 1),
        (multi_node.shutil, "rmtree", 3),
    ],
)
def test_a_killed_run_goes_on_with_any_number_of_tasks(
    options: ReshardOptions, tmp_path: Path, owner: Any, name: str, call: int
) -> None:
    wanted = expected(options, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, owner, name, call)
        with pytest.raises(Killed):
            run(options, 4)
    for folder in [*(tmp_path / "temp").iterdir(), *(tmp_path / "out").glob(".*")]:
        (folder / ".tmp-half").write_text("what a SIGKILL leaves")
    assert not options.output.exists() or name in ("rmtree", "draw_lengths")
    written: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = buckets.atomic_file
        patch.setattr(buckets, "atomic_file", lambda path: written.append(path) or whole(path))
        assert run(reshard.replace(options, threads=2), 3) == ROWS
    assert contents(options.output) == wanted
    assert not list((tmp_path / "temp").iterdir())
    if owner is buckets.np and call == 6:  # what was done is kept
        assert not [path for path in written if path.suffix in (".arrow", ".npz")]
        assert len(written) < len(wanted)


@pytest.mark.slow
def test_a_changed_input_begins_anew(options: ReshardOptions, tmp_path: Path) -> None:
    run(options, 2, STAGES[:4])
    pq.write_table(pa.table({"text": ["new"], "id": [0]}), tmp_path / "data/9.parquet")
    assert run(options, 2) == ROWS + 1
    assert contents(options.output) == expected(options, tmp_path)


def test_errors_name_what_is_wrong(options: ReshardOptions, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--temp-dir: several tasks need a folder"):
        ReshardTask(reshard.replace(options, temp_dir=None), task=0, tasks=2)
    with pytest.raises(InputError, match="no column 'nope'"):
        run(reshard.replace(options, column="nope"), 2)
    assert not (tmp_path / "temp").exists()
    assert not (tmp_path / "out").exists()
    run(options, 2, STAGES[:4])
    next((tmp_path / "out/.shuffled.reshard").glob("data_3.parquet")).unlink()
    with pytest.raises(RelayrunError, match=r"1 files are missing, the first is data_3\.parquet"):
        run(options, 2, ("finish",))
    assert run(options, 2) == run(options, 2) == ROWS
    with pytest.raises(InputError, match="the output exists"):
        run(reshard.replace(options, seed=77), 2)
    with pytest.raises(RelayrunError, match="another job finished"):
        run(reshard.replace(options, seed=77), 2, ("scatter",))
    (options.output / "kept").touch()
    with contextlib.suppress(RelayrunError):
        run(options, 2)
    assert (options.output / "kept").exists()
