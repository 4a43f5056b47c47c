"""What the commands do, for programs: submit a run, wait for it, read how it stands, stop it.

    from relayrun.api import submit

    run = submit("configs/runs/demo.yaml", training={"steps": 40})
    if run.wait() != "done":
        print(run.status().why)

Settings are checked as by `relayrun submit`, and errors are `relayrun.errors.RelayrunError`. A handle may be made in
any process and on any node that sees the run directory; it keeps no state.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommonConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.chain.campaign import start_due_members
from relayrun.control.chain.stop_requests import request_stop
from relayrun.control.rundir.campaign import campaign_folders
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler.factory import local_scheduler
from relayrun.errors import ConfigError, SchedulerError, user_name
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.cost import ChainCost
from relayrun.submit.submission import SubmittedRun
from relayrun.watch import unsent_notices
from relayrun.watch.status import queue
from relayrun.watch.status.run_status import RunStatus, read_run_status
from relayrun.watch.status.summary import UNFINISHED_STATES, RunState

__all__ = ["RunHandle", "submit"]


class RunHandle:
    """A run: its directory, or its project/name below logs/runs of the project. Raises RunDirError if it is none."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = find_run(os.fspath(run))

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run.path

    def status(self) -> RunStatus:
        """Return what `relayrun status RUN` shows."""
        return read_run_status(self._run, queue.query_queue(self._run), now=time.time())

    def wait(self, *, seconds: float = math.inf, every: float = 30.0) -> RunState:
        """Wait until the chain has ended or is blocked, at most `seconds`; return its state. The scheduler is asked
        `every` so many seconds. Jobs of the local scheduler run inside this call, whatever `seconds` is."""
        until = time.monotonic() + seconds
        if batch_system(Plan.load(self._run).scheduler).one_machine:
            with contextlib.suppress(SchedulerError):  # another process runs them
                local_scheduler(self._run).run_queue(lambda _: None)
        while (state := self.status().state) in UNFINISHED_STATES and (left := until - time.monotonic()) > 0:
            time.sleep(min(every, left))
        return state

    def stop(self) -> str:
        """Write a checkpoint and end the chain, as `relayrun stop RUN`; return a sentence about the effect."""
        said = request_stop(self._run, queue.run_scheduler(self._run), user=user_name(os.geteuid()))
        unsent_notices.send_in_background(self._run)
        start_due_members(campaign_folders([self._run]))
        return said


def submit(
    config: str | os.PathLike[str],
    *,
    resume: bool = False,
    accept_data_change: bool = False,
    take_over: bool = False,
    yes: bool = False,
    **changes: object,
) -> RunHandle:
    """Submit a run config, with `changes` of its settings: `training={"steps": 40}`, or `**{"training.steps": 40}`.

    The other arguments are the options of `relayrun submit`. Raises RelayrunError if the check refuses it, or if it can
    use more node hours than `ask_above_node_hours` without `yes`; then nothing is queued.
    """
    given = resolve.read_settings(Path(config), list(_overrides(changes)))
    intent = SubmitIntent(resume=resume, accept_data_change=accept_data_change, take_over=take_over)

    def confirm(cost: ChainCost) -> None:
        if cost.most > cost.ask_above and not yes:
            words = f"this can use more than {cost.ask_above:g} node hours (ask_above_node_hours)"
            raise ConfigError(words, hint="give yes=True, or set chain.max_node_hours")

    return RunHandle(submit_settings(given, resolve.validate_settings(given), intent, confirm=confirm).run.path)


def submit_settings(
    given: LocatedSettings, config: CommonConfig, intent: SubmitIntent, *, confirm: Callable[[ChainCost], None]
) -> SubmittedRun:
    """Submit settings, and send the run's notices. Raises like `submission.submit_run`."""
    submitted = submission.submit_run(config, given=given, confirm=confirm, **vars(intent))
    unsent_notices.send_in_background(submitted.run)
    return submitted


def _overrides(changes: Mapping[str, object], above: str = "") -> Iterator[str]:
    for name, value in changes.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{above}{name}.")
        else:
            yield f"{above}{name}={json.dumps(value, default=os.fspath)}"  # JSON is YAML
