"""Data that a site removes when nobody uses them are reported before they go."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir import storage_limits
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import DAY_SECONDS
from relayrun.watch import cron_check
from relayrun.watch.status import run_status, run_status_text
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.symptoms import purged_soon
from relayrun.watch.text import print_table
from tests.history import make_history
from tests.workspace import Workspace

NOW = time.mktime(time.strptime("2026-11-20T08:00:00", "%Y-%m-%dT%H:%M:%S"))


def use(path: Path, *, days_ago: float) -> None:
    """Set when a file was last read and written."""
    os.utime(path, (NOW - days_ago * DAY_SECONDS,) * 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run on scratch, whose files go after 30 days; its newest checkpoint was last used 25 days ago, its data 28."""
    scratch = tmp_path / "scratch"
    run = make_history(scratch / "runs/p/r", lines=30, attempts=3)
    for path in (run.path / "local").glob("job-*.json"):
        path.unlink()
    replace(Plan.load(run), purge_days={str(scratch): 30.0}).write(run.plan)
    use(run.checkpoint(30) / "data", days_ago=25)
    shards = []
    for number in range(3):
        prefix = scratch / f"shard-{number}"
        prefix.with_suffix(".bin").write_bytes(b"x")
        use(prefix.with_suffix(".bin"), days_ago=10 * number + 8)
        shards.append({"prefix": str(prefix)})
    files = [{"path": "s3://bucket/text.parquet"}, {"path": str(scratch / "none.parquet")}]
    manifest = {"datasets": {"web": {"shards": shards, "files": files}}, "validation": {}}
    run.manifest.write_text(json.dumps(manifest))
    return run


def gathered(run: Run) -> run_status.RunStatus:
    return run_status.read_run_status(Run(run.path), QueueStatus(), now=NOW)


def test_status_says_what_goes_first_and_when(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(run_status_text.run_status_table(gathered(run), now=NOW))
    out = capsys.readouterr().out
    assert "the checkpoint of iteration 30 may be purged in 5.0 days, on 2026-11-25 (" in out
    assert "/scratch: 30 days without use; first " in out
    assert "training data may be purged in 2.0 days, on 2026-11-22 (" in out
    assert gathered(run).purges[1].path.endswith("shard-2.bin")
    as_json = run_status_text.run_status_as_json(gathered(run))
    assert [each["what"] for each in as_json["purges"]] == ["checkpoint", "data"]
    use(run.checkpoint(30) / "data", days_ago=31)
    assert "iteration 30 may be purged at any moment, since 2026-11-19" in gathered(run).purges[0].words(NOW)


def test_reading_or_writing_is_use(run: Run) -> None:
    data = run.checkpoint(30) / "data"
    os.utime(data, (NOW, NOW - 100 * DAY_SECONDS))
    assert gathered(run).purges[0].time == pytest.approx(NOW + 30 * DAY_SECONDS)
    os.utime(data, (NOW - 100 * DAY_SECONDS, NOW - DAY_SECONDS))
    assert gathered(run).purges[0].time == pytest.approx(NOW + 29 * DAY_SECONDS)


def test_of_a_chain_that_has_ended_the_checkpoint_counts(run: Run) -> None:
    run.stop.write_text("done: all\n")
    assert [each.what for each in gathered(run).purges] == ["checkpoint"]


def test_the_innermost_folder_counts_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x").touch()
    use(tmp_path / "a/b/x", days_ago=0)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    rules = {str(tmp_path / "link"): 30.0, f"{tmp_path}/link/b": 10.0, str(tmp_path / "a2"): 1.0}
    found = storage_limits.first_purge("x", "data", [str(tmp_path / "link/b/x")], rules)
    assert found is not None
    assert (found.days, found.time) == (10.0, pytest.approx(NOW + 10 * DAY_SECONDS))
    assert storage_limits.first_purge("x", "data", [str(tmp_path / "a/b/x")], {"/scratch": 1.0}) is None
    assert storage_limits.first_purge("x", "data", [str(tmp_path / "none")], rules) is None


def test_of_many_files_some_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    monkeypatch.setattr(storage_limits, "_purge_rule", lambda path, _: looked_at.append(path))
    storage_limits.first_purge("x", "data", [f"/x/{number}" for number in range(10_001)], {"/x": 1.0})
    assert 900 < len(looked_at) <= storage_limits.MAX_FILES_CHECKED


def test_without_the_setting_nothing_is_looked_at(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(Plan.load(run), purge_days={}).write(run.plan)
    monkeypatch.setattr(storage_limits, "first_purge", None)
    assert gathered(run).purges == []


def test_a_week_before_somebody_is_told(run: Run) -> None:
    purges = gathered(run).purges
    told = list(purged_soon(purges, now=NOW))
    assert [each.cause.rpartition("-")[0] for each in told] == ["purge-checkpoint", "purge-data"]
    assert all(each.event == "disk" for each in told)
    assert list(purged_soon(purges, now=NOW - 10 * DAY_SECONDS)) == []


@pytest.mark.parametrize("ended", [True, False])
def test_the_sentinel_tells_it_once(run: Run, ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    if ended:
        run.stop.write_text("done: all\n")
    folder = run.path.parents[1]
    lines = [line for minute in (0, 2, 4, 61, 63) for line in cron_check.check_folder(folder, now=NOW + 60 * minute)]
    told = [line for line in lines if "may be purged" in line]
    assert len([line for line in told if "the checkpoint of iteration 30" in line]) == 1
    assert len([line for line in told if "training data" in line]) == (0 if ended else 1)


@pytest.mark.slow
def test_check_warns_of_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = Workspace.make(tmp_path)
    config = workspace.config("run", cluster={"purge_days": {str(tmp_path): 30}})
    assert main(["check", str(config)]) == 0
    assert re.search(r"training data may be purged in (29|30)\.\d days", capsys.readouterr().out)
    config = workspace.config("run", cluster={"purge_days": {str(tmp_path): 5}})  # a check reads the data, too
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"storage\.purge\s+training data may be purged in (4\.9|5\.0) days", out)
    assert "2 warnings" in out
