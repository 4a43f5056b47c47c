"""When the state is saved, and what comes of it.

With `checkpoint.async_save` a save holds training only while its parts are listed; they are copied beside the
next forward and backward pass and written beside the steps that follow. Weights and optimizer change in the
update alone, so the update waits for the copy.

| due while a save is under way | then |
|---|---|
| `checkpoint.interval` | training waits for the end of that save, so that every multiple is saved; a line says so |
| `triggers/save` | begins at the first step after its end; nothing waits |
| leaving | waits for its end; then what was trained since is saved |

A save counts when it is published; only then are triggers answered. Its failure is said on rank 0 and known to
all ranks at the same step; training goes on, and the next save is another chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from relayrun.control.rundir.triggers import Trigger
from relayrun.tokens.order.progress import TrainingProgress
from relayrun.train.checkpoint.background import BackgroundSave
from relayrun.train.checkpoint.state import Checkpointer, SaveFailed
from relayrun.train.control import AgreedRequests, RequestPoller
from relayrun.train.hook_list import Hooks
from relayrun.train.reporting.heartbeat import HeartbeatWriter
from relayrun.train.reporting.timings import Timings

FINAL_SAVE_TRIES = 3
"""How often a save is tried when leaving; a save in between is tried once and left for the next occasion."""


class Saver:
    """Called by all ranks together, at the same steps."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        control: RequestPoller,
        hooks: Hooks,
        say: Callable[[str], None],
        timings: Timings,
        pulse: HeartbeatWriter,
        asynchronous: bool,
        saved_iteration: int,
    ) -> None:
        self._checkpointer = checkpointer
        self._control = control
        self._hooks = hooks
        self._say = say
        self._timings = timings
        self._pulse = pulse
        self._asynchronous = asynchronous
        self._under_way: BackgroundSave | None = None
        self._asked: Sequence[Trigger] = ()
        """The triggers that the save under way answers."""
        self._lead = control.lead
        """Without a save under way, as it was last said."""
        self.saved_iteration = saved_iteration
        """The newest durable one."""
        self.stall_seconds = 0.0
        """How long saves have held training; whoever reports it sets it to 0."""
        self._reserved = not asynchronous

    def reserve(self, iteration: int) -> None:
        """Once, when the optimizer has its state: allocate host memory for the copies of saves beside training.

        It holds training for as long as that takes, and counts as time of saves.
        """
        if self._reserved:
            return
        self._reserved = True
        started = time.perf_counter()
        self._pulse.enter("save", iteration)
        reserved = self._checkpointer.reserve()
        seconds = time.perf_counter() - started
        self.stall_seconds += seconds
        if reserved is not None:
            size, pieces = reserved.size / (1 << 30), reserved.pieces
            self._say(f"host memory for saves: {size:.1f} GiB on this rank, {pieces} pieces, in {seconds:.1f} s")

    def look(self) -> AgreedRequests:
        """See what is asked for; a save that is over on every rank is concluded."""
        if self._under_way is not None:
            self._control.lead = self._timings.lead(under_way=self._under_way.seconds)
        agreed = self._control.look(saving=self._under_way is not None and not self._under_way.over)
        if not agreed.saving:
            self._conclude()
        return agreed

    def asked(self, position: TrainingProgress) -> None:
        """Somebody wants a checkpoint: begin it now, or after the one under way."""
        if self._under_way is not None:
            return
        at, taken = position.iteration, self._control.take()
        if at == self.saved_iteration:
            self._control.acknowledge(taken, at, f"nothing trained since iteration {at}")
        else:
            self._begin(position, taken)

    def due(self, position: TrainingProgress) -> None:
        """This iteration is one of those that are saved."""
        iteration = position.iteration
        if iteration not in (self.saved_iteration, self._iteration_under_way):
            if self._under_way is not None:
                self._say(
                    f"iteration {iteration} is to be saved, and the save of iteration {self._iteration_under_way} is "
                    "still under way: waiting for it; saves are slower than checkpoint.interval"
                )
            self.settle(iteration)
            self._begin(position, ())

    def before_update(self) -> float:
        """Wait until the state may change; return the seconds it took."""
        if self._under_way is None or self._under_way.copied:
            return 0.0
        started = time.perf_counter()
        self._under_way.wait_for_copy()
        seconds = time.perf_counter() - started
        self.stall_seconds += seconds
        return seconds

    def settle(self, iteration: int) -> None:
        """Wait for the end of the save under way, if there is one. `iteration`: where training stands."""
        if self._under_way is not None:
            started = time.perf_counter()
            self._pulse.enter("save", iteration)
            self._conclude()
            self.stall_seconds += time.perf_counter() - started

    def last(self, position: TrainingProgress) -> str | None:
        """Before leaving: make the state durable. Returns what went wrong, in words; None: it is durable."""
        self.settle(position.iteration)
        result = None
        for _ in range(FINAL_SAVE_TRIES):
            if position.iteration == self.saved_iteration:
                return None
            result = self._begin(position, (), leaving=True)
        return None if position.iteration == self.saved_iteration else result

    @property
    def _iteration_under_way(self) -> int | None:
        return None if self._under_way is None else self._under_way.iteration

    def _begin(self, position: TrainingProgress, asked: Sequence[Trigger], *, leaving: bool = False) -> str:
        started = time.perf_counter()
        self._pulse.enter("save", position.iteration)
        beside = self._asynchronous and not leaving
        self._under_way = self._checkpointer.begin(position, copy=self._asynchronous, beside=beside)
        self._asked = asked
        result = "" if beside else self._conclude()
        self.stall_seconds += time.perf_counter() - started
        return result

    def _conclude(self) -> str:
        """Wait for the save under way and say what came of it, in words."""
        save, asked = self._under_way, self._asked
        if save is None:
            return ""
        try:
            commit = save.result()
        except SaveFailed as error:
            result = f"failed: {error}"
            self._hooks.after_failed_save(save.iteration, str(error))
        else:
            result = "saved"
            self.saved_iteration = save.iteration
            self._hooks.after_save(commit)
        self._under_way, self._asked = None, ()
        self.move_deadline()
        self._control.acknowledge(asked, save.iteration, result)
        return result

    def move_deadline(self) -> None:
        """The lead follows what was measured."""
        before, self._control.lead = self._lead, self._timings.lead()
        if abs(self._control.lead - before) > 1:
            self._say(
                f"lead {before:.0f} s -> {self._control.lead:.0f} s before the end of the job "
                f"(95 % of steps within {self._timings.step_p95 or 0:.2f} s, of saves within "
                f"{self._timings.save_p95 or 0:.1f} s)"
            )
        self._lead = self._control.lead
