"""A report as text for people, and as JSON for programs."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.storage_limits import format_bytes
from relayrun.control.trainers.registry import trainer_of
from relayrun.submit.check.findings import QUIET_LEVELS, CheckFinding, count_noun
from relayrun.submit.check.report import CheckReport
from relayrun.submit.forecast import SECONDS_PER_HOUR, Forecast
from relayrun.terminal import format_table, print_rows, raw_stream, terminal_width
from relayrun.watch.text import format_seconds

LEVEL_COLORS = {"ok": 32, "assumed": 36, "not checked": 36, "warning": 33, "error": 31}
"""Colours of a terminal: green, cyan, yellow, red."""


def print_report(report: CheckReport, changes: Sequence[str]) -> None:
    """Print findings and plan. `changes`: what differs from the run's last revision, a line each."""
    print_findings(report.findings.all)
    facts = [*_plan_rows(report), *(("" if number else "changes", change) for number, change in enumerate(changes))]
    print_rows(("", ""), facts, title=f"plan of {report.plan.run}")
    findings = report.findings
    errors, warnings = count_noun(len(findings.errors), "error"), count_noun(len(findings.warnings), "warning")
    verdict = "submit would refuse this" if findings.errors else "submit would take this"
    print(f"{errors}, {warnings}: {verdict}")


def print_findings(findings: Sequence[CheckFinding]) -> None:
    """Print a table with a line a finding; what to do stands below it. On a terminal the levels have colours."""
    rows = [(each.level, each.name, "\n".join(_finding_lines(each))) for each in findings]
    table = format_table(("", "", ""), rows, width=terminal_width())
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        levels = re.compile(rf"^({'|'.join(LEVEL_COLORS)})\b", re.M)
        table = levels.sub(lambda found: f"\033[{LEVEL_COLORS[found[0]]}m{found[0]}\033[0m", table)
    print(table, file=raw_stream(sys.stdout), flush=True)


def check_report_as_json(report: CheckReport, changes: Sequence[str]) -> dict[str, Any]:
    """Return a report for JSON; `relayrun help check` says what the names mean. What is not known is null."""
    future = report.forecast
    return {
        "run": report.plan.run,
        "run_dir": str(report.run.path),
        "refused": bool(report.findings.errors),
        "findings": [finding.as_json() for finding in report.findings.all],
        "data": [asdict(each) | {"epochs": each.epochs} for each in report.usage],
        "node_hours_most": None if math.isinf(report.cost.most) else report.cost.most,
        "plan": None if future is None else _plan_json(future),
        "changes": list(changes),
    }


def _plan_json(future: Forecast) -> dict[str, Any]:
    same = ["nodes", "gpus", "layout", "parameters", "steps", "steps_done", "tokens", "tokens_left"]
    same += ["hours", "jobs", "node_hours", "cost"]
    checkpoint, interval, pace = future.checkpoint, future.save_interval, future.speed
    return {name: getattr(future, name) for name in same} | {
        "ranks": future.config.world_size,
        "padded_vocabulary_size": future.vocabulary_size,
        "memory_bytes": asdict(future.memory) | {"total": future.memory.total},
        "gpu_memory_bytes": future.gpu_memory,
        "host_copies_bytes": future.host_copies,
        "flops_left": future.flops,
        "tokens_per_second": pace and pace.tokens_per_second,
        "speed_source": pace and pace.source,
        "currency": future.config.cluster.currency,
        "checkpoint_bytes": checkpoint.bytes,
        "checkpoint_source": checkpoint.source,
        "checkpoints_kept": checkpoint.kept,
        "checkpoints_kept_bytes": checkpoint.kept_bytes,
        "checkpoints_most_bytes": checkpoint.most_bytes,
        "save_interval_steps": future.config.checkpoint.interval,
        "best_save_interval_seconds": interval and interval.seconds,
        "best_save_interval_steps": future.best_interval_steps,
        "save_seconds": interval and interval.save,
        "mtbf_seconds": interval and interval.mtbf,
        "mtbf_source": interval and interval.mtbf_source,
    }


def _finding_lines(finding: CheckFinding) -> list[str]:
    if finding.level in QUIET_LEVELS:
        return [finding.words]
    line = finding.line.removeprefix(f"{Path.cwd()}/")
    return [line, f"-> {finding.remedy}"] if finding.remedy else [line]


def _plan_rows(report: CheckReport) -> Iterator[tuple[str, str]]:
    config, future = report.config, report.forecast
    job = config.job
    gpus = f", {job.gpus_per_node} GPUs each" if job.gpus_per_node else ""
    spare = f" and {count_noun(job.spare_nodes, 'spare node')}" if job.spare_nodes else ""
    size = f"{count_noun(job.nodes, 'node')}{spare}{gpus}, {count_noun(job.ntasks_per_node, 'rank')} a node"
    yield "jobs", f"{size}, {job.time} each, on {config.cluster.name}"
    if not isinstance(config, RunConfig):
        yield from _foreign_plan_rows(report)
        return
    if future is None:
        yield "model", "its size depends on the tokenizer, which could not be read"
        return
    yield "layout", ", ".join(f"{name} {size}" for name, size in future.layout.items())
    yield "parameters", f"{future.parameters:,} with a vocabulary of {future.vocabulary_size:,}"
    memory = future.memory
    parts = f"state {format_bytes(memory.state)}, activations {format_bytes(memory.activations)}, "
    parts += f"loss {format_bytes(memory.loss)}"
    there = "of an unknown size" if future.gpu_memory is None else f"of {format_bytes(future.gpu_memory)}"
    owner, whole = ("a GPU", there) if future.gpus else ("a rank", "by formula")
    yield f"memory of {owner}", f"{format_bytes(memory.total)} {whole}: {parts}"
    if future.host_copies:
        yield "memory of a node", f"{format_bytes(future.host_copies)} for the copies of saves, by formula"
    left = f"; {future.tokens_left:,} remain after step {future.steps_done:,}" if future.steps_done else ""
    yield "tokens", f"{future.tokens:,} in {future.steps:,} steps{left}"
    for each in report.usage:
        if each.epochs is not None:
            end = "" if each.used_up_at is None else f", used up at step {each.used_up_at:,}"
            words = f"{each.share:.1%} of the samples, {each.epochs:,.2f} epochs of {each.tokens:,} tokens{end}"
            yield f"  {each.name}", words
    yield "FLOPs", f"{future.flops:.3g} (6 a parameter and token, and attention; recomputation not counted)"
    yield "time", _time_words(future)
    yield "node hours", report.cost.words
    checkpoint = future.checkpoint
    yield (
        "checkpoints",
        f"{format_bytes(checkpoint.bytes)} each ({checkpoint.source}); {checkpoint.kept} are kept, "
        f"{format_bytes(checkpoint.kept_bytes)}, and at most {format_bytes(checkpoint.most_bytes)} lie there at a time",
    )
    yield "save interval", _save_interval_words(future)


def _foreign_plan_rows(report: CheckReport) -> Iterator[tuple[str, str]]:
    yield "trainer", report.config.trainer
    yield "a rank executes", shlex.join(rank_command(report))
    steps = report.plan.total_steps
    yield "steps", "until the program ends with exit code 0" if steps is None else f"{steps:,}"
    yield "checkpoints", f"below {report.run.checkpoints}; their size is not known before there is one"
    yield "time", "not known: how fast the program is shows when it runs"
    yield "node hours", report.cost.words


def command_as_comment(report: CheckReport) -> list[str]:
    """Return the command of a rank and the notes on its flags as lines of a comment, a flag a line."""
    lines = ["what a rank executes:"]
    for word in rank_command(report):
        if word.startswith("--") or len(lines) == 1:
            lines.append(f"  {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    lines += [finding.words for finding in report.findings.all if finding.name == "megatron_lm.args"]
    return [f"# {line}" for line in lines]


def rank_command(report: CheckReport) -> list[str]:
    """Return the command of a rank of the run's next attempt, as far as it is known before."""
    trainer = trainer_of(report.plan, report.run)
    begin = AttemptStart(
        attempt=max(report.run.attempt_numbers(), default=0) + 1,
        job_id="",
        job_name=report.plan.job_name,
        nodes="",
        config_revision=report.plan.config_revision,
        base_iteration=report.plan.load_iteration,
        base_path=report.plan.load_path,
        start_time=0.0,
        job_end_time=None,
        grace_period=report.plan.grace_period,
    )
    return [*report.plan.command_prefix, *trainer.command(begin)]


def _time_words(future: Forecast) -> str:
    if future.hours is None or future.speed is None:
        return "not known: no run of this shape was measured; cluster.tflops_per_gpu may say what to take"
    jobs = "" if future.jobs is None else f", {future.jobs} jobs or more"
    speed = f"{future.speed.tokens_per_second:,.0f} tokens/s ({future.speed.source})"
    return f"{format_seconds(future.hours * SECONDS_PER_HOUR)} of training at {speed}{jobs}"


def _save_interval_words(future: Forecast) -> str:
    words = f"{future.config.checkpoint.interval:,} steps"
    best = future.save_interval
    if best is None:
        return f"{words}; by Young and Daly: not known before a save and failures (or cluster.node_mtbf_hours) are"
    steps = "" if future.best_interval_steps is None else f", {future.best_interval_steps:,} steps"
    return (
        f"{words}; by Young and Daly {format_seconds(best.seconds)}{steps}: a save takes {best.save:.1f} s "
        f"({best.save_source}), failures are {format_seconds(best.mtbf)} apart ({best.mtbf_source})"
    )
