"""Where the ranks of an attempt write what they print."""

from __future__ import annotations

import os

from relayrun.control.rundir.records import AttemptStart


def stdout_beside(log: str | None) -> str | None:
    """Standard output of the job whose standard error is `log`: `launchers/lib/log.sh` opens both side by side."""
    return log.removesuffix(".err") + ".out" if log is not None and log.endswith(".err") else None


def job_logs(begin: AttemptStart) -> list[tuple[str, int]]:
    """Standard output and error of the attempt's job, with their bytes when the attempt began; none without a log."""
    output = stdout_beside(begin.log)
    if begin.log is None or output is None:
        return []
    return [(output, begin.output_offset), (begin.log, begin.log_offset)]


def file_size(path: str) -> int:
    """Return the bytes of a file, 0 where there is none. Raises OSError."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0
