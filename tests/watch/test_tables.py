"""Tables fit a terminal of 80 columns, whatever the names, and lose nothing for it."""

from __future__ import annotations

import io
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.cli import main
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.submit.check.findings import CheckFinding
from relayrun.submit.check.report_text import print_findings
from relayrun.terminal import format_table
from relayrun.tokens.tokenize import dump_status
from relayrun.tokens.tokenize.shard_folder import RunningTask, SkippedFile, TaskRecord
from relayrun.watch.status import queue
from tests.accounted import make_accounted
from tests.pictured import make_pictured

NAME = "llama3-8b-long-context-phase-2-cooldown-with-another-tokenizer"
REASON = "rank 3 on nid001234: CUDA error: device-side assert triggered (exit code 1), as its log says: /scratch/x.err"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Two runs of a sweep with long names and settings, in a project with a long path, on a terminal of 80 columns."""
    folder = tmp_path / "a-project-folder-with-a-long-name/on-scratch"
    folder.mkdir(parents=True)
    (folder / "bin").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}/bin")
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    project = folder / "logs/runs/swissai-pretraining"
    made = make_accounted(project / NAME, name=f"swissai-pretraining/{NAME}", scheduler="local")
    other = make_pictured(folder, name=f"swissai-pretraining/{NAME}-2")
    found = [made, other]
    members = []
    for number, run in enumerate(found, start=1):
        write_stop(run, ChainEnd("failed", REASON))
        CampaignMembership(folder=str(project / "sweep"), member=f"{number:02}").write(campaign.membership_path(run))
        settings = {"optimizer.learning_rate": number * 1e-4, "training.global_batch_size": 512 * number}
        members.append(CampaignMember(name=f"{number:02}", run_dir=str(run.path), settings=settings))
    (project / "sweep").mkdir()
    Campaign(kind="sweep", name="tests/c", owner=os.geteuid(), scheduler="local", at_once=1, members=members).save(
        project / "sweep"
    )
    return found


def shown(monkeypatch: pytest.MonkeyPatch, *words: str, code: int = 0) -> str:
    """What a command prints on a terminal, without colours."""
    screen = _Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        assert main([*words]) == code
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


SENTENCES = ("due: ", "swissai-pretraining/", "effective training time", "over all allocated time")
"""Beginnings of lines outside tables, which the terminal folds by itself."""

COMMANDS: dict[str, Sequence[str]] = {
    "status": ("status",),
    "status of one": ("status", f"swissai-pretraining/{NAME}"),
    "runs": ("runs", "list"),
    "goodput": ("goodput", f"swissai-pretraining/{NAME}", f"swissai-pretraining/{NAME}-2"),
    "report": ("report", "--text", f"swissai-pretraining/{NAME}-2"),
    "sweep": ("sweep", "status", "logs/runs/swissai-pretraining/sweep"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fits_80_columns(runs: list[Run], monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    text = shown(monkeypatch, *COMMANDS[command])
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith(SENTENCES)] == []
    assert NAME in text.replace("\n", "")
    if command not in ("goodput", "report"):
        assert "exit code 1" in " ".join(text.split())
    monkeypatch.setenv("COLUMNS", "400")
    rows = shown(monkeypatch, *COMMANDS[command]).splitlines()
    if command == "goodput":
        assert re.search(r"^ +2  880414 +16  failed +81.7% ", text, re.M), text
    if command in ("status", "sweep"):
        assert len([row for row in rows if not row.startswith(SENTENCES[0])]) == 1 + len(runs)


def dump(index: int, **values: object) -> dump_status.DumpStatus:
    task = RunningTask(
        shard="0", node="nid001234", job="", started=0.0, at=90.0, documents=1, tokens=98_765_432_109, bytes_read=1
    )
    fields: dict[str, object] = {
        "state": "running",
        "of": 128,
        "bytes": 9 << 40,
        "running": (task,),
        "silent": (),
        "error": None,
    }
    first = TaskRecord(
        inputs=[("f", 4 << 40, 0)],
        tokens=1_234_567_890_123,
        seconds=1e6,
        skipped=[SkippedFile(file="f", error="f: torn")] * 12,
        bad_lines={"not JSON": 12_345},
    )
    fields["finished"] = (first, *[TaskRecord(inputs=[])] * 117)
    return dump_status.DumpStatus(index=index, **fields | values)  # type: ignore[arg-type]


def test_the_table_of_dumps_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", _Terminal())
    table = dump_status.status_table([dump(0), dump(1, state="done", running=())]).partition("\ndump 0 left out")[0]
    assert [line for line in table.splitlines() if len(line) > 80] == []
    for words in ("1,333,333,322,232", "nid001234", "12 files, 12,345 lines", "118/128", "1/2 done"):
        assert words in table, table


def test_what_a_check_found_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", screen)
    remedy = "set chain.max_failed_attempts, or ask somebody who knows this machine what its prolog does"
    print_findings([CheckFinding(name="slurm.test", level="warning", words=REASON, remedy=remedy)])
    first, *others = screen.getvalue().splitlines()
    assert first.startswith("warning  slurm.test  rank 3 on nid001234: CUDA error: ")
    assert max(map(len, (first, *others))) <= 80
    assert f"-> {remedy}" in " ".join(" ".join(others).split())


WORDS = st.text("abc ,:-名", max_size=60)


@given(
    st.integers(20, 120),
    st.integers(1, 7).flatmap(
        lambda count: st.tuples(
            st.lists(
                st.sampled_from(["a", "a long name of a column", "n|n", "a long name|n"]),
                min_size=count,
                max_size=count,
            ),
            st.lists(st.lists(WORDS, min_size=count, max_size=count), max_size=4),
        )
    ),
)
def test_a_table_fits_and_holds_all(width: int, table: tuple[list[str], list[list[str]]]) -> None:
    columns, rows = table
    lines = format_table(columns, rows, width=width).splitlines()
    assert max(map(len, lines), default=0) <= width
    there = Counter("".join(lines))
    assert not Counter("".join(text for row in rows for text in row if text.strip()).replace(" ", "")) - there
