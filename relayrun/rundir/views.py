"""The merged views of a run: `metrics.jsonl` and `attempts.jsonl` at its root, kept by the supervisor alone.

For an iteration the newest attempt wins: what an attempt computed beyond the checkpoint that the next
one started from is dropped, since the next one computes it again. Iterations rise strictly, without gap.
Standard library only.
"""

from __future__ import annotations

import json
from typing import Any

from relayrun.files import read_lines, write_atomic
from relayrun.rundir.layout import RunDir
from relayrun.rundir.records import Begin, End


def merged_metrics(run: RunDir) -> list[dict[str, Any]]:
    """All lines that count, oldest first, over all attempts."""
    lines: list[dict[str, Any]] = []
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        begin = Begin.read(attempt.begin)
        if begin is None:
            continue
        while lines and lines[-1]["iteration"] > begin.base_iteration:
            lines.pop()
        lines += [line for line in read_lines(attempt.metrics) if line.get("iteration", 0) > begin.base_iteration]
    return lines


def merged_attempts(run: RunDir) -> list[dict[str, Any]]:
    """One object per attempt: what it began with and, where it has ended, how."""
    rows: list[dict[str, Any]] = []
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        begin, end = Begin.read(attempt.begin), End.read(attempt.end)
        if begin is not None:
            rows.append(vars(begin) | (vars(end) if end is not None else {}))
    return rows


def write_views(run: RunDir) -> None:
    """Rewrite both views."""
    write_atomic(run.metrics_view, _text(merged_metrics(run)))
    write_atomic(run.attempts_view, _text(merged_attempts(run)))


def _text(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
