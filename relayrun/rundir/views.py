"""The merged views of a run: `metrics.jsonl` and `attempts.jsonl` at its root, kept by the supervisor alone.

For an iteration the newest attempt wins: what an attempt computed beyond the checkpoint that the next
one started from is dropped, since the next one computes it again; so is what it computed before a rewind.
Iterations rise strictly, without gap.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from relayrun.files import read_lines, write_atomic
from relayrun.rundir.records import Begin, End
from relayrun.rundir.run import Run


def merged_metrics(run: Run) -> list[dict[str, Any]]:
    """All lines that count, oldest first, over all attempts."""
    return list(lines_that_count(run))


def lines_that_count(run: Run, *, above: int = 0, before: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of the merged view, oldest first, of iterations above `above`; files that cannot hold any are not read.

    With `before`, an attempt and the number of a rewind in it, the view as it was when that had not happened; number 0
    is the attempt's begin.
    """
    begins = [begin for number in run.attempt_numbers() if (begin := Begin.read(run.attempt(number).begin))]
    begins = [begin for begin in begins if before is None or (begin.attempt, 0) < before]
    for number, begin in enumerate(begins):
        last = min((later.base_iteration for later in begins[number + 1 :]), default=None)
        if last is not None and last <= max(above, begin.base_iteration):
            continue
        rewound = [entry["base_iteration"] for entry in read_lines(run.attempt(begin.attempt).rewinds)]
        left = None
        if before is not None and begin.attempt == before[0]:
            rewound, left = rewound[: before[1] - 1], before[1]
        for line in read_lines(run.attempt(begin.attempt).metrics):
            iteration = line.get("iteration", 0)
            if "rewind" in line:  # the attempt went back to a checkpoint: it computes what lies beyond it again
                rewound = rewound[1:]
                left = None if left is None else left - 1
                if left == 0:
                    break
            elif iteration > max(above, begin.base_iteration) and all(
                iteration <= end for end in (*rewound, *([] if last is None else [last]))
            ):
                yield line


def merged_attempts(run: Run) -> list[dict[str, Any]]:
    """One object per attempt: what it began with and, where it has ended, how."""
    rows: list[dict[str, Any]] = []
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        begin, end = Begin.read(attempt.begin), End.read(attempt.end)
        if begin is not None:
            rows.append(vars(begin) | (vars(end) if end is not None else {}))
    return rows


def write_views(run: Run) -> None:
    """Rewrite both views."""
    write_atomic(run.metrics_view, _text(merged_metrics(run)))
    write_atomic(run.attempts_view, _text(merged_attempts(run)))


def _text(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
