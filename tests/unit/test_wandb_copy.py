"""Copies of W&B runs. Read from a fake of `wandb.Api`, since there is no network here; written by the real client to a
stand-in for the service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import InputError
from relayrun.monitoring.trackers.wandb_copy import Project, copy_project
from tests.wandb_service import WandBService

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TARGET = Project("me", "experiments"), Project("team", "paper")


@dataclass
class FakeRun:
    id: str
    rows: list[dict[str, Any]]
    name: str = "llama"
    config: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    tags: list[str] = field(default_factory=lambda: ["baseline"])
    notes: str | None = None
    group: str | None = None
    lost_at: int = -1
    """The connection breaks before this step."""

    @property
    def summary_metrics(self) -> dict[str, Any]:
        return {"best": 1.5, "_runtime": 3, "sample": {"_type": "image-file"}}

    def scan_history(self, *, page_size: int, min_step: int, use_cache: bool) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            if row["_step"] == self.lost_at:
                raise ConnectionError("lost")
            if row["_step"] >= min_step:
                yield row


@dataclass
class FakeApi:
    found: list[FakeRun]

    def run(self, path: str) -> FakeRun:
        return next(run for run in self.found if path == f"{SOURCE}/{run.id}")

    def runs(self, path: str) -> list[FakeRun]:
        assert path == str(SOURCE)
        return self.found


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"_step": 3 * k, "_timestamp": 1e9 + k, "_runtime": k, "loss": 1 / (k + 1), "acc": None} for k in range(count)
    ]


def test_a_copy_onto_itself_and_one_name_for_many_are_refused() -> None:
    with pytest.raises(InputError, match="the same project"):
        list(copy_project(FakeApi([]), SOURCE, SOURCE, run_ids=[]))
    with pytest.raises(InputError, match="a new name is for one run"):
        list(copy_project(FakeApi([]), SOURCE, TARGET, run_ids=[], new_name="x"))


@pytest.mark.slow
def test_copies_have_every_row_and_a_second_call_sends_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    monkeypatch.chdir(tmp_path)
    api: Any = FakeApi([FakeRun("aaaa1111", rows(2500)), FakeRun("bbbb2222", rows(3), lost_at=6)])
    api.found[1].rows[2]["picture"] = {"_type": "image-file", "path": "x.png"}
    with WandBService() as service:
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        with pytest.raises(ConnectionError):
            list(copy_project(api, SOURCE, TARGET, run_ids=[]))
        wandb.finish()
        assert [row["_step"] for row in service.history("bbbb2222")] == [0, 3]
        api.found[1].lost_at = -1
        lines = list(copy_project(api, SOURCE, TARGET, run_ids=["bbbb2222"], new_name="ablation"))
        assert lines == ["bbbb2222 (ablation): 1 rows from step 4 on to team/paper"]
        again = list(copy_project(api, SOURCE, TARGET, run_ids=[]))
        assert [line.partition(" from")[0] for line in again] == [
            "aaaa1111 (llama): 0 rows",
            "bbbb2222 (llama): 0 rows",
        ]
        wandb.teardown()
        whole = service.history("aaaa1111")
        assert [(row["_step"], row["_timestamp"], row["loss"]) for row in whole] == [
            (row["_step"], row["_timestamp"], row["loss"]) for row in api.found[0].rows
        ]
        assert [row["_step"] for row in service.history("bbbb2222")] == [0, 3, 6]
        made = service.buckets["aaaa1111"]["inserted"]
        assert (made["entity"], made["project"], made["displayName"], made["tags"]) == (
            "team",
            "paper",
            "llama",
            ["baseline"],
        )
        assert json.loads(made["config"])["lr"] == {"value": 0.1}
        assert service.summaries["aaaa1111"]["best"] == 1.5
        assert "sample" not in service.summaries["aaaa1111"]
    assert "media are not copied: picture" in capsys.readouterr().err


def test_help_does_not_import_wandb() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "scripts/tools/copy_wandb_project.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-se" in done.stdout
    assert "wandb.sdk" not in done.stderr
