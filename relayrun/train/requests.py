"""Requests to a running attempt: signals, trigger files, the time limit. Rank 0 looks, all ranks agree.

| cause | seen by | then | outcome |
|---|---|---|---|
| SIGUSR2, SIGTERM | any rank | save, leave | saved |
| `attempts/N/stop` | rank 0 | save, leave | saved |
| the grace period before the time limit begins | rank 0 | save, leave | saved |
| `triggers/exit` | rank 0 | save, leave, end the chain | exit |
| `triggers/save` | rank 0 | save, continue | |
| an asynchronous save has ended | every rank | conclude it | |

Signals set a flag; the loop reads it after each step. SIGUSR1 dumps the Python stacks. One small all-reduce per step
(gloo, on the host) carries the requests; no rank decides alone. If the node's agent reports that there is no request
(`agent.requests`), rank 0 does not read the files.

Standard library only: the handlers are installed before the import of torch, which takes seconds. A rank starts with
SIGUSR1 and SIGUSR2 ignored, so neither can kill it earlier.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from relayrun.control.agent import requests
from relayrun.control.rundir import triggers
from relayrun.control.rundir.records import AttemptOutcomeName, AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.triggers import Trigger
from relayrun.errors import warned
from relayrun.files import text_of, write_atomic

if TYPE_CHECKING:
    from relayrun.train.distributed import Ranks

log = logging.getLogger(__name__)

LEAVE_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class SignalFlag:
    """The first signal that asked this process to leave."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._process = os.getpid()

    def install(self) -> None:
        """Catch LEAVE_SIGNALS in this process; a forked child keeps the handler, which does nothing there."""
        for number in LEAVE_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self.received is None:
            self.received = signal.Signals(number)


def dump_stacks_on_request(path: Path) -> None:
    """Append the stacks of all threads to `path` at every SIGUSR1, also while the main thread hangs in C; then write
    the unfinished collectives of this rank beside it. If `path` cannot be opened, stacks go to standard error."""
    file: TextIO = sys.stderr
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    except OSError as error:
        log.warning("stacks will go to standard error: %s", error)
    else:
        beside = path.with_name(f"collectives-{path.stem.removeprefix('rank-')}.json")
        threading.Thread(target=_dump_collectives, args=(file, beside), name="collectives", daemon=True).start()
    # a chained handler would interrupt system calls
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _dump_collectives(stacks: TextIO, path: Path) -> None:
    """Whenever stacks were appended, write the unfinished collectives that torch's flight recorders have, over NCCL and
    over gloo. The dump that torch writes itself, after the timeout of a collective, is a pickle."""
    seen = os.fstat(stacks.fileno()).st_size
    while True:
        time.sleep(0.5)
        before, seen = seen, os.fstat(stacks.fileno()).st_size
        if seen == before or (module := sys.modules.get("torch._C._distributed_c10d")) is None:
            continue
        found = []
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            with contextlib.suppress(Exception):  # this build has none, or another format
                entries = json.loads(getattr(module, name)())["entries"]
                # NCCL leaves sends and receives of a batch as scheduled, also when they are done
                found += [one for one in entries if not (one["is_p2p"] and "nccl" in name)]
        found = [one for one in found if not (one["retired"] or one["state"] == "completed")]
        with contextlib.suppress(OSError):
            write_atomic(path, json.dumps(found), durable=False)


@dataclass(frozen=True, kw_only=True)
class AgreedRequests:
    """Requests on which all ranks agreed."""

    leave: AttemptOutcomeName | None = None
    save: bool = False
    """A user touched triggers/save."""
    saving: bool = False
    """A save is still in progress on some rank."""
    reason: str = ""
    """Reason to leave, in words; complete on rank 0 only."""


class RequestPoller:
    """Looks for requests to save or to leave. `agent`: the memory folder of the node's agent; None without an agent."""

    def __init__(
        self, run: Run, begin: AttemptStart, ranks: Ranks, flag: SignalFlag, *, agent: Path | None = None
    ) -> None:
        self._run, self._attempt, self._ranks, self._flag = run, run.attempt(begin.attempt), ranks, flag
        self._begin, self._job_end = begin, begin.job_end_time
        self.grace_period = begin.grace_period
        """Grace period in seconds: the attempt leaves so long before the end of the job. It may change at any time."""
        self._agent = agent
        self._looked = -math.inf
        """Time of the last look at the files, by the monotonic clock."""
        self._stop: list[str] = []
        self._exit: Trigger | None = None
        self._save: Trigger | None = None
        self._taken: set[Trigger] = set()

    def poll(self, *, saving: bool = False) -> AgreedRequests:
        """Agree with the other ranks; all of them call it equally often.

        `saving`: this rank's part of a save is still in progress.
        """
        reasons: list[str] = []
        if self._ranks.rank == 0:
            if self._time_is_over():
                reasons.append("time limit near")
            self._look_at_files()
            reasons += self._stop
        received = 0 if self._flag.received is None else self._flag.received.value
        signalled, asked, exit_now, save_now, busy = self._ranks.maximum(
            [received, bool(reasons), self._exit is not None, self._save is not None, saving]
        )
        leave: AttemptOutcomeName | None = None
        reason = ""
        if exit_now:
            leave, reason = "exit", f"exit trigger by {self._exit.user}" if self._exit is not None else ""
        elif signalled or asked:
            leave, words = "saved", [signal.Signals(signalled).name] if signalled else []
            reason = "; ".join(words + reasons)
        return AgreedRequests(leave=leave, save=bool(save_now), saving=bool(busy), reason=reason)

    def _time_is_over(self) -> bool:
        """Return whether the grace period has begun; only then the files are asked for a later end."""
        if self._job_end is not None and time.time() >= self._job_end - self.grace_period:
            self._job_end = self._attempt.job_end_time(self._begin)
        return self._job_end is not None and time.time() >= self._job_end - self.grace_period

    def take(self) -> tuple[Trigger, ...]:
        """Return the triggers that the last `poll` saw, on rank 0; later looks do not report them again.

        So a file that cannot be removed counts once, and a save in progress is requested once.
        """
        taken = tuple(trigger for trigger in (self._save, self._exit) if trigger is not None)
        self._taken.update(taken)
        self._save = self._exit = None
        return taken

    def acknowledge(self, taken: Sequence[Trigger], iteration: int, result: str) -> None:
        """Answer triggers that were taken."""
        for trigger in taken:
            with warned(log, "trigger %s not acknowledged", trigger.name):
                triggers.acknowledge_trigger(self._run, trigger, iteration=iteration, result=result)

    def _look_at_files(self) -> None:
        """Read stop file and triggers; with an agent only if it reports a request, and once a second."""
        if self._agent is not None:
            if requests.nothing_asked(self._agent):
                self._stop, self._exit, self._save = [], None, None
                return
            if time.monotonic() - self._looked < requests.LOOK_SECONDS:
                return  # the last result holds until it is taken
        self._looked, self._stop = time.monotonic(), []
        with warned(log, "could not look for stop and triggers"):  # a short outage must not cost steps
            if (text := text_of(self._attempt.stop)) is not None:
                self._stop = [": ".join(filter(None, ["stop file", text.strip()]))]
            self._exit, self._save = self._trigger("exit"), self._trigger("save")

    def _trigger(self, name: triggers.TriggerName) -> Trigger | None:
        trigger = triggers.read_trigger(self._run, name)
        return None if trigger in self._taken else trigger
