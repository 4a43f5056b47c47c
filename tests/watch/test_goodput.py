"""`relayrun goodput`: every node-second of a run in one part, and the parts sum to what was allocated."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.rundir.run import Run
from relayrun.files import append_line
from relayrun.watch.goodput import tables
from relayrun.watch.goodput.account import NodeTimeAccount, account_for_run
from relayrun.watch.goodput.attribution import NEEDED_COLUMNS, read_metrics_blocks
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, PARTS
from relayrun.watch.report.report_data import read_report_data
from tests import accounted
from tests.accounted import T, make_accounted
from tests.watch.goodput_parts import by_name, install, seconds, step, written

ROOT = Path(__file__).resolve().parents[2]

PAGE = (ROOT / "docs/how-to/goodput.md").read_text(encoding="utf-8")

PARTS_PAGE = (ROOT / "docs/reference/goodput-parts.md").read_text(encoding="utf-8")


def test_an_attempt_that_recorded_no_end_ends_where_slurm_says(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cancelled on a full disk: the picture drew a cancelled job of 26 s up to the end of the run."""
    run.attempt(1).end.unlink()
    row = read_report_data(run).attempts[0]
    assert (row.cause, row.seconds) == ("unknown", 171.0 - 65.0)
    sacct = tmp_path / "bin" / "sacct"
    sacct.write_text(sacct.read_text().replace("41|FAILED", "41|CANCELLED by 0"))
    row = read_report_data(run).attempts[0]
    assert (row.cause, row.seconds) == ("cancelled", 171.0 - 65.0)
    assert row.reason == "the job was CANCELLED, as sacct says; it recorded no end"
    assert main(["goodput", str(run.path)]) == 0
    assert "cancelled" in capsys.readouterr().out


def test_every_second_of_a_run_is_in_the_part_where_it_belongs(run: Run) -> None:
    found = account_for_run(run)
    assert seconds(found.parts) == pytest.approx({name: 2 * each for name, each in accounted.PARTS.items()}, abs=1e-5)
    assert sum(found.parts.values()) == found.allocated == (111 + 100) * 2 * MICROSECONDS_PER_SECOND
    assert [each.allocation.source for each in found.allocations] == ["sacct", "sacct"]
    assert found.waited == {"queued": (60 + 74) * MICROSECONDS_PER_SECOND, "back-off": 0, "stopped": 0}
    assert found.elapsed == 345 * MICROSECONDS_PER_SECOND
    assert found.goodput == pytest.approx(2 * 50 / 422)
    assert found.effective_training_time == pytest.approx(50 / 345)
    assert (found.work.iterations, found.work.redone_iterations) == (10, 3)
    assert found.tokens_per_node_hour == pytest.approx(10 * 1000 / (422 / 3600))
    assert found.mfu == pytest.approx(0.4 * (7.5 + 4 * 5.5 + 8.5 + 4 * 5.5) * 2 / 422)
    failed, done = found.losses
    assert (failed.cause, failed.times, failed.nodes) == ("failed", 1, {"n1": 1})
    assert failed.lost == round((accounted.PARTS["redone"] + accounted.PARTS["recovery"]) * 2 * MICROSECONDS_PER_SECOND)
    assert failed.waited == 74 * MICROSECONDS_PER_SECOND
    assert (done.cause, done.lost, done.starts) == ("done", 0, 0)


def test_without_accounting_the_chain_knows_the_ends_of_its_jobs_but_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin", monkeypatch)
    found = account_for_run(make_accounted(tmp_path / "run"))
    assert [(each.start - T, each.end - T) for each in found.allocations] == [(60, 171), (245, 343.5)]
    assert [each.allocation.source for each in found.allocations] == ["the chain", "the chain"]
    assert seconds(found.parts)["end"] == pytest.approx(2 * (4.5 + 3.0), abs=1e-5)
    assert found.parts["unknown"] == 0


def test_the_controller_is_asked_where_there_is_no_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row.split("|") for row in accounted.SACCT.splitlines()]
    squeue = "\n".join("|".join([*row[:3], row[3], "", *row[5:]]) for row in rows)
    squeue += "\n43|PENDING|2|2026-11-20T08:05:00||2026-11-21T08:05:00|2026-11-21T09:05:00"
    refuses = "echo Slurm accounting storage is disabled >&2; exit 1"
    install(tmp_path / "bin", monkeypatch, sacct=refuses, squeue=f"cat << 'END'\n{squeue}\nEND")
    found = account_for_run(make_accounted(tmp_path / "run"))
    assert [(each.allocation.source, each.end - T) for each in found.allocations] == [("squeue", 171), ("squeue", 345)]


def test_a_job_that_was_queued_again_has_several_stays_and_one_that_began_nothing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row.replace("42|", "41|") for row in accounted.SACCT.splitlines()]
    between = "41|REQUEUED|2|2026-11-20T08:02:51|2026-11-20T08:02:51|2026-11-20T08:03:00|2026-11-20T08:03:30"
    install(tmp_path / "bin", monkeypatch, sacct=by_name("\n".join([rows[0], between, rows[1]])))
    run = make_accounted(tmp_path / "run")
    begin = run.attempt(2).begin
    begin.write_text(begin.read_text().replace('"job_id": "42"', '"job_id": "41"'))
    found = account_for_run(run)
    assert [each.attempt for each in found.allocations] == [1, None, 2]
    assert seconds(found.allocations[1].parts) == {"no attempt": 60.0}
    assert found.waited["queued"] == (60 + 9 + 35) * MICROSECONDS_PER_SECOND
    assert sum(found.parts.values()) == found.allocated == (111 + 30 + 100) * 2 * MICROSECONDS_PER_SECOND
    assert main(["goodput", str(run.path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [(each["attempt"], each["job_id"]) for each in value["attempts"]] == [(1, "41"), (2, "41")]
    (job,) = value["jobs_without_attempt"]
    assert (job["job_id"], job["state"], job["nodes"], job["allocated_node_seconds"]) == ("41", "REQUEUED", 2, 60.0)
    assert job["why"] == "the job was REQUEUED before an attempt began in it, as sacct says"
    assert (job["node_seconds"]["no attempt"], job["running"]) == (60.0, False)
    assert "attempt" not in job
    both = [*value["attempts"], *value["jobs_without_attempt"]]
    assert sum(each["allocated_node_seconds"] for each in both) == value["allocated_node_seconds"]
    page = read_report_data(run).account
    assert [each.attempt for each in page.allocations] == [1, None, 2]


def test_jobs_before_the_first_attempt_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job had nodes for an hour and began nothing; hours later somebody submitted the run again."""
    at = "T0{}:00:00".format
    lost = f"40|FAILED|2|2026-11-20{at(2)}|2026-11-20{at(2)}|2026-11-20{at(3)}|2026-11-20{at(4)}"
    script = 'case "$*" in *--starttime=2026-11-20T0[01]*) echo "$LOST";; esac\n' + by_name(accounted.SACCT)
    install(tmp_path / "bin", monkeypatch, sacct=script)
    monkeypatch.setenv("LOST", lost)
    run = make_accounted(tmp_path / "run")
    run.config.mkdir(exist_ok=True)
    for revision, moment in ((1, T - 6 * 3600), (2, T)):
        run.config_revision(revision).touch()
        os.utime(run.config_revision(revision), (moment, moment))
    found = account_for_run(run)
    assert [(each.allocation.job_id, each.attempt) for each in found.allocations] == [
        ("40", None),
        ("41", 1),
        ("42", 2),
    ]
    assert seconds(found.parts)["no attempt"] == 2 * 3600


def test_the_commands_of_the_page_and_what_it_shows(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.path.parents[3])
    (text, shown) = re.findall(r"^```(?:bash)?\n(.*?)^```$", PAGE, re.M | re.S)
    table, as_json = (shlex.split(line) for line in text.splitlines())
    assert main(table[1:]) == 0
    out = capsys.readouterr().out
    first, _, last = shown.partition("\n\nby cause of the end\n")  # the page leaves the table by attempt out
    assert out.startswith(first)
    assert out.endswith(f"\n\nby cause of the end\n{last}")
    for words in ("where the node time went", "by attempt", "by cause of the end", "n1 (1)"):
        assert words in out
    assert main(as_json[1:]) == 0
    value = json.loads(capsys.readouterr().out)
    assert sum(value["node_seconds"].values()) == pytest.approx(value["allocated_node_seconds"], abs=1e-4)
    assert [each["times_from"] for each in value["attempts"]] == ["sacct", "sacct"]
    assert main(["goodput", str(run.path), str(run.path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_the_table_of_the_page_is_that_of_the_program() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| (.+) \|$", PARTS_PAGE, re.M)
    assert rows == [(part.name, part.group, part.words) for part in PARTS]


def test_a_run_without_an_attempt_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_accounted(tmp_path / "run", scheduler="local")
    for number in (1, 2):
        run.attempt(number).begin.unlink()
    assert main(["goodput", str(run.path)]) == 1
    assert "no attempt of this run has begun" in capsys.readouterr().err


# --- lines


def torn(path: Path, text: str) -> None:
    """A torn line, as a killed writer leaves."""
    with path.open("a") as file:
        file.write(text)


def test_blocks_hold_what_the_lines_hold(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [step(n, 10.0 * n, 1.5, mfu=None, skipped=None) for n in range(1, 50)]
    lines[10]["skipped"] = "loss, nan"
    lines[20] = {"iteration": 20, "validation": {"a": 1.0}, "evaluation_seconds": 2.0, "time": 205.0}
    lines[30]["loss"] = float("nan")
    path = tmp_path / "metrics.jsonl"
    for number, line in enumerate(lines):
        append_line(path, line, durable=False)
        if number == 25:
            torn(path, '{"iteration": 26, "lo')
    torn(path, '{"iteration": 99, "loss": 1.0')
    (block,) = read_metrics_blocks(path, NEEDED_COLUMNS)
    assert block.rows == len(lines)
    assert block.columns["iteration"].tolist() == [line["iteration"] for line in lines]
    assert block.columns["time"].tolist() == [line["time"] for line in lines]
    assert block.records == {20: lines[20]}
    assert not list(read_metrics_blocks(tmp_path / "none", NEEDED_COLUMNS))


def test_a_file_that_changes_its_form_is_read_as_a_parser_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayrun.control.rundir.restarts.METRICS_CHUNK", 1000)
    lines = [step(n, float(n), timers={"a": {"min": 1.0}}) if n % 3 else step(n, float(n)) for n in range(1, 40)]
    lines += [step(n, float(n), params_norm=2.0, memory=[1, 2]) for n in range(40, 90)]
    blocks = written(tmp_path, lines)
    assert len(blocks) > 3
    assert [n for block in blocks for n in block.columns["iteration"].tolist()] == list(range(1, 90))
    assert not any(block.records for block in blocks)


def test_the_summary_says_what_is_left_out(run: Run) -> None:
    run.evaluations.mkdir(exist_ok=True)
    run.evaluation_policy.write_text('{"interval": 5, "total_steps": 10, "hold": 1, "time_limit": 60}')
    found: NodeTimeAccount = account_for_run(run)
    assert "evaluations have jobs of their own" in tables.account_summary(found)
