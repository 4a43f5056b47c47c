"""Where the ranks of an attempt write what they print."""

from __future__ import annotations

from relayrun.rundir.records import AttemptStart


def logs_of(begin: AttemptStart) -> list[tuple[str, int]]:
    """Standard output and error of the attempt's job, each with its bytes when the attempt began.

    The job script opens both side by side (`launchers/lib/log.sh`). Where it could open none, there is none to read.
    """
    if begin.log is None or not begin.log.endswith(".err"):
        return []
    return [(begin.log.removesuffix(".err") + ".out", begin.output_offset), (begin.log, begin.log_offset)]
