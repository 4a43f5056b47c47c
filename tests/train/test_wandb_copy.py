"""Copies of W&B runs. Read from a fake of `wandb.Api`, since there is no network here; written by the real client to a
stand-in for the service."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import InputError
from tests.wandb_service import WandBService

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("copy_wandb_project", ROOT / "scripts/tools/copy_wandb_project.py")
assert _spec is not None
assert _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
sys.modules["copy_wandb_project"] = program  # its dataclass looks for its module
_spec.loader.exec_module(program)
WandbProject, copy_project = program.WandbProject, program.copy_project
SOURCE, TARGET = WandbProject("me", "experiments"), WandbProject("team", "paper")


@dataclass
class FakeFile:
    name: str
    content: str

    def download(self, root: str, *, replace: bool) -> None:
        path = Path(root, self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.content, encoding="utf-8")


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
    system: list[dict[str, Any]] = field(default_factory=list)
    stored: list[FakeFile] = field(default_factory=list)

    @property
    def summary_metrics(self) -> dict[str, Any]:
        return {"best": 1.5, "_runtime": 3, "sample": {"_type": "image-file"}}

    def scan_history(self, *, page_size: int, min_step: int, use_cache: bool) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            if row["_step"] == self.lost_at:
                raise ConnectionError("lost")
            if row["_step"] >= min_step:
                yield row

    def history(self, *, samples: int, stream: str, pandas: bool) -> list[dict[str, Any]]:
        assert (stream, pandas) == ("system", False)
        return self.system[:samples]

    def files(self) -> list[FakeFile]:
        return self.stored


@dataclass
class FakeApi:
    found: list[FakeRun]
    service: WandBService | None = None
    """Has the copies."""

    def run(self, path: str) -> FakeRun:
        name = path.rpartition("/")[2]
        if path.startswith(f"{TARGET}/"):
            assert self.service is not None
            return FakeRun(name, [], system=[json.loads(line) for line in self.service.events.get(name, [])])
        return next(run for run in self.found if path == f"{SOURCE}/{run.id}")

    def runs(self, path: str) -> list[FakeRun]:
        assert path == str(SOURCE)
        return self.found


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"_step": 3 * k, "_timestamp": 1e9 + k, "_runtime": k, "loss": 1 / (k + 1), "acc": None} for k in range(count)
    ]


def test_a_copy_onto_itself_and_other_than_one_name_a_run_are_refused() -> None:
    with pytest.raises(InputError, match="the same project"):
        list(copy_project(FakeApi([]), SOURCE, SOURCE, run_ids=[]))
    with pytest.raises(InputError, match=r"1 names \(-n\) for 0 runs \(-r\)"):
        list(copy_project(FakeApi([]), SOURCE, TARGET, run_ids=[], names=["x"]))
    with pytest.raises(InputError, match=r"1 names \(-n\) for 2 runs \(-r\): each run gets one"):
        list(copy_project(FakeApi([]), SOURCE, TARGET, run_ids=["a", "b"], names=["x"]))


@pytest.mark.slow
def test_copies_have_every_row_and_a_second_call_sends_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    monkeypatch.chdir(tmp_path)
    api: Any = FakeApi([FakeRun("aaaa1111", rows(2500)), FakeRun("bbbb2222", rows(3), lost_at=6)])
    api.found[1].rows[2]["picture"] = {"_type": "image-file", "path": "x.png"}
    with WandBService() as service:
        api.service = service
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        with pytest.raises(ConnectionError):
            list(copy_project(api, SOURCE, TARGET, run_ids=[]))
        wandb.finish()
        assert [row["_step"] for row in service.history("bbbb2222")] == [0, 3]
        api.found[1].lost_at = -1
        lines = list(copy_project(api, SOURCE, TARGET, run_ids=["bbbb2222"], names=["ablation"]))
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


@pytest.mark.slow
def test_files_and_system_metrics_are_copied_with_their_times_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.chdir(tmp_path)
    system = [{"_timestamp": 1.7e9 + 15 * k, "_runtime": 15.0 * k, "system.cpu": 10.0 + k} for k in range(4)]
    stored = [FakeFile("output.log", "step 1\n"), FakeFile("code/run.sh", "true\n"), FakeFile("media/images/x.png", "")]
    stored.append(FakeFile("wandb-summary.json", "{}"))
    api: Any = FakeApi([FakeRun("cccc3333", rows(2), system=system[:3], stored=stored), FakeRun("dddd4444", rows(1))])
    with WandBService() as service:
        api.service = service
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        assert list(copy_project(api, SOURCE, TARGET, run_ids=["dddd4444", "cccc3333"], names=["one", "two"])) == [
            "dddd4444 (one): 1 rows to team/paper",
            "cccc3333 (two): 2 rows and 2 files to team/paper",
        ]
        api.found[0].system = system
        list(copy_project(api, SOURCE, TARGET, run_ids=["cccc3333"], names=["two"]))
        wandb.teardown()
        copied = [json.loads(line) for line in service.events["cccc3333"]]
        assert [(row["_timestamp"], row["system.cpu"]) for row in copied] == [
            (row["_timestamp"], row["system.cpu"]) for row in system
        ]
        sent = service.uploads["cccc3333"]
        assert (sent["output.log"], sent["code/run.sh"]) == (b"step 1\n", b"true\n")
        assert not [name for name in sent if name.startswith("media/")]
        assert [service.buckets[id_]["inserted"]["displayName"] for id_ in ("cccc3333", "dddd4444")] == ["two", "one"]


SHORT = "-se a -sp b -de c -dp d -r x y -n p q"
"""How the earlier system's script is called."""
LONG = "--src-entity a --src-project b --dst-entity c --dst-project d --runs x y --names p q"
BEFORE = (
    "--source-entity a --source-project b --destination-entity c --destination-project d --run-id x y --new-name p q"
)


@pytest.mark.slow
@pytest.mark.parametrize("words", [SHORT, LONG, BEFORE])
def test_the_flags_of_the_earlier_system_and_those_of_earlier_versions_are_taken(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    asked: dict[str, Any] = {}

    def take(api: object, *projects: Any, **options: Any) -> list[str]:
        asked.update(options, projects=projects)
        return []

    monkeypatch.setattr(program, "copy_project", take)
    monkeypatch.setattr(wandb, "Api", lambda: None)
    monkeypatch.setattr("sys.argv", ["copy_wandb_project.py", *words.split()])
    program.main()
    assert asked == {
        "projects": (WandbProject("a", "b"), WandbProject("c", "d")),
        "run_ids": ["x", "y"],
        "names": ["p", "q"],
    }


@pytest.mark.slow
def test_help_does_not_import_wandb() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "scripts/tools/copy_wandb_project.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "-se" in done.stdout
    assert "wandb.sdk" not in done.stderr
