"""Starts the process that copies checkpoints to a second place, beside the ranks and never in their way.

It runs with the lowest priority and may be killed at any point; the next one goes on. What it says stands in
`mirror/log` of the run directory.
"""

from __future__ import annotations

import subprocess
import time

from relayrun.control.chain import background
from relayrun.control.rundir import mirror
from relayrun.control.rundir.mirror import MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run

COPY_AGAIN_SECONDS = 900.0
"""Between two passes, where no checkpoint was saved meanwhile: what failed may work now."""


class CheckpointCopier:
    """Has the checkpoints of a run copied, where its config asks for it."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self._run = run
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: int | None = None
        """What told of saves when the last pass began."""
        self._next = 0.0

    def look(self, saved: int) -> None:
        """Start a pass where there is something new. `saved` changes with each save. Raises OSError, RelayrunError."""
        if self._process is not None and self._process.poll() is None:
            return
        if saved == self._seen and time.monotonic() < self._next:
            return
        self._seen, self._next = saved, time.monotonic() + COPY_AGAIN_SECONDS
        policy = MirrorPolicy.read_own(mirror.mirror_policy_path(self._run))
        if policy is not None:
            self._process = self._start(policy.program)

    def _start(self, program: list[str]) -> subprocess.Popen[bytes]:
        with open(mirror.mirror_folder(self._run) / "log", "ab") as log:
            return subprocess.Popen(
                ["nice", "-n", "19", *program, str(self._run.path)],
                env=background.background_environment(self._plan),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finish(self) -> None:
        """End the pass that is under way: the job ends."""
        if self._process is not None:
            background.end_process_group(self._process)
