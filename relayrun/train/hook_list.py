"""The hooks of one attempt on one rank: relayrun's own, then those of `training.hooks`; made and called here.

`TrackerProcesses` is rank 0's side of W&B and TensorBoard: it starts a process for each and ends it in time.

Nothing here may stop or slow training: what fails is said in one line. The feeds themselves are
`tracker_feed`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptOutcome, AttemptStart, CheckpointCommit
from relayrun.control.rundir.restarts import Rollback
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.control.trainers.tools import wandb_mode
from relayrun.errors import ConfigError, FatalTrainingError, RelayrunError
from relayrun.train import user_code
from relayrun.train.distributed import Ranks
from relayrun.train.hooks import (
    Action,
    Gradients,
    Hook,
    HookContext,
    HookFailed,
    Step,
    StepStart,
    UpdateVerdict,
    ValidationResult,
)
from relayrun.train.loss_guard import LossGuard
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.reporting.debugging import Profiler
from relayrun.train.reporting.liveness import FirstStepNotice, SectionReporter, Timings, has_agent
from relayrun.train.reporting.metrics import Metrics, ProgressLog

if TYPE_CHECKING:
    from relayrun.config.sections.training import HookEntry

BETWEEN_STEPS = ("before_step", "after_step", "at_rewind", "after_save", "after_failed_save", "at_evaluation")
"""Methods whose time is `Step.hooks_seconds`; that of `before_update` is part of the step."""


def import_hooks(entries: Sequence[HookEntry], ranks: Ranks) -> list[tuple[str, Hook]]:
    """Import and make the hooks of `training.hooks`, with their import paths; called by all ranks together.

    Raises ConfigError on all ranks alike if one of them could not.
    """
    if not entries:
        return []
    return user_code.agree_on_user_code(
        lambda: [(entry.hook, _make(entry)) for entry in entries],
        ranks,
        setting="training.hooks",
        hint="write module:Class, a class that inherits relayrun.train.hooks.Hook, where the ranks' Python "
        "finds its module",
    )


def _make(entry: HookEntry) -> Hook:
    path = entry.hook
    try:
        found = user_code.import_user_code(path)
    except ConfigError as error:
        raise ConfigError(f"hook {error.message}") from error
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise ConfigError(f"hook {path} is no class that inherits relayrun.train.hooks.Hook")
    try:
        made = found(**entry.options)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"hook {path} cannot be made with the options {entry.options}: {user_code.describe_error(error)}"
        ) from error
    if _overrides(made, "state_dict") != _overrides(made, "load_state_dict"):
        raise ConfigError(f"hook {path} has one of state_dict and load_state_dict without the other")
    return made


class Hooks:
    """Calls the hooks in their order: relayrun's own, then the user's. See `hooks.py` for when and on which ranks."""

    def __init__(
        self,
        own: Sequence[Hook],
        users: Sequence[tuple[str, Hook]],
        ranks: Ranks,
        sections: SectionReporter | None = None,
    ) -> None:
        """`users`: what `import_hooks` gave. `sections`: where it is told that one of them runs."""
        self._ranks = ranks
        self._sections = sections
        self._users = bool(users)
        self._seconds = 0.0
        named = [(hook.name, hook, False) for hook in own] + [(path, hook, True) for path, hook in users]
        self._calls: dict[str, list[Callable[..., Any]]] = {
            method: [
                self._guarded(path, getattr(hook, method)) if guarded else getattr(hook, method)
                for path, hook, guarded in named
                if _overrides(hook, method)
            ]
            for method in vars(Hook)
            if callable(getattr(Hook, method)) and not method.startswith("_")
        }
        keeping = [name for name, hook, _ in named if _overrides(hook, "state_dict")]
        self._save = dict(zip(keeping, self._calls["state_dict"], strict=True))
        self._load = dict(zip(keeping, self._calls["load_state_dict"], strict=True))
        self._initial: dict[str, dict[str, Any]] = {}
        self._say: Callable[[str], None] = lambda text: None
        self._may_differ = any(hook.may_differ for _, hook, _ in named if _overrides(hook, "before_update"))

    def setup(self, context: HookContext) -> None:
        """Set all hooks up. What each would save now is what it loads later from a checkpoint without a state of it."""
        self._say = context.say
        self._call("setup", context)
        self._initial = copy.deepcopy(self.state_dict())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint keeps of the hooks, by their names; the values are still theirs, so write them at once."""
        states = {name: save() for name, save in self._save.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, common: Mapping[str, Any]) -> None:
        """Put in place what `state_dict` gave; `common` holds other things, too, none of which has a colon in its name.

        A hook that is gone or new is no error: one line says it.
        """
        for name in common:
            if ":" in name and name not in self._load:
                self._say(f"hook {name} has a state in this checkpoint and is not in training.hooks: it is left out")
        for name, load in self._load.items():
            if name not in common:
                self._say(f"hook {name} has no state in this checkpoint: it begins anew")
            load(common[name] if name in common else copy.deepcopy(self._initial.get(name, {})))

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        self._call("at_start", iteration, consumed_samples)

    def before_step(self, start: StepStart) -> None:
        self._call("before_step", start)

    def before_update(self, gradients: Gradients) -> UpdateVerdict:
        """What all hooks on all ranks make of an iteration."""
        verdict = UpdateVerdict(Action.UPDATE)
        for call in self._calls["before_update"]:
            found: UpdateVerdict | None = call(gradients)
            if found is not None and found.action > verdict.action:
                verdict = found
        if self._may_differ:
            action = Action(self._ranks.maximum([verdict.action])[0])
            if action is not verdict.action:
                verdict = UpdateVerdict(action, "another rank saw trouble")
        return verdict

    def after_step(self, step: Step) -> None:
        self._call("after_step", step)

    def at_rewind(self, rewind: Rollback) -> None:
        self._call("at_rewind", rewind)

    def before_publish(self, iteration: int, folder: Path) -> None:
        self._call("before_publish", iteration, folder)

    def after_save(self, commit: CheckpointCommit) -> None:
        self._call("after_save", commit)

    def after_failed_save(self, iteration: int, error: str) -> None:
        self._call("after_failed_save", iteration, error)

    def at_evaluation(self, result: ValidationResult) -> None:
        self._call("at_evaluation", result)

    def at_end(self, outcome: AttemptOutcome) -> None:
        self._call("at_end", outcome)

    def close(self) -> None:
        self._call("close")

    def take_seconds(self) -> float | None:
        """What a user's hooks took between steps since the last call; None: there are none."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds if self._users else None

    def _call(self, method: str, *facts: object) -> None:
        for call in self._calls[method]:
            call(*facts)

    def _guarded(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A user's method, whose errors name it."""
        name = method.__name__
        where = f"hook {path}, {name}"

        in_the_loop = self._sections is not None and name in (*BETWEEN_STEPS, "before_update")

        def call(*facts: object) -> Any:
            began = time.perf_counter()
            try:
                with self._sections.within("hooks") if in_the_loop else nullcontext():  # type: ignore[union-attr]
                    return _checked(name, path, method(*facts))
            except FatalTrainingError as error:
                raise FatalTrainingError(error.message, where=error.where or where, hint=error.hint) from error
            except (Exception, SystemExit) as error:
                raise HookFailed(f"{where}: {user_code.describe_error(error)}") from error
            finally:
                if name in BETWEEN_STEPS:
                    self._seconds += time.perf_counter() - began

        return call


def _overrides(hook: Hook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(Hook, method)


def _checked(method: str, path: str, value: Any) -> Any:
    """What a user's method returned, if it is what it should be. Raises TypeError."""
    if method == "state_dict":
        if not isinstance(value, dict):
            raise TypeError(f"returned {type(value).__name__} instead of a dict")
        _check_plain(value, "")
    if method == "before_update" and value is not None:
        if not isinstance(value, UpdateVerdict):
            raise TypeError(f"returned {type(value).__name__} instead of a Verdict or None")
        return UpdateVerdict(value.action, f"{path}: {value.reason or value.action.name.lower()}")
    return value


def _check_plain(value: object, at: str) -> None:
    """Raise TypeError for what a checkpoint would not give back."""
    from torch import Tensor
    from torch.nn import Parameter

    if type(value) is dict:
        for key, item in value.items():
            _check_plain(key, f"{at}[{key!r}]")
            _check_plain(item, f"{at}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):  # type: ignore[arg-type]
            _check_plain(item, f"{at}[{number}]")
    elif not (value is None or type(value) in (bool, int, float, str) or type(value) in (Tensor, Parameter)):
        raise TypeError(f"state{at} is a {type(value).__name__}; a checkpoint keeps plain values and tensors")


LEAVE_SECONDS = 5.0
"""How long rank 0 waits for its feeds when its state is durable and its outcome is written. Less than the margin of
the lead (`rundir.time_limit.GRACE_MARGIN`); what is not handed on by then, the next attempt's feed hands on."""


class TrackerProcesses(Hook):
    """The feeds of one attempt."""

    def __init__(self, run: Run, attempt: int, config: RunConfig, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._config, self._say = run, attempt, config, say
        self._feeds: list[subprocess.Popen[bytes]] = []

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        run, config, say = self._run, self._config, self._say
        mode = wandb_mode(os.environ)
        names = (["wandb"] if mode else []) + (["tensorboard"] if config.tracking.tensorboard else [])
        try:
            stream = update_tracker_runs(run)[-1] if names else None
            for name in names:
                self._feeds.append(_start(name, run, self._attempt))
        except (OSError, RelayrunError) as error:
            say(f"warning: W&B and TensorBoard are off in this attempt: {error}")
            return
        if mode and stream is not None:
            say(f"W&B is on ({mode}): project {config.project}, run {config.name}, id {stream.id}")
        else:
            say("W&B is off: neither WANDB_API_KEY nor WANDB_MODE=offline is in the environment")

    def close(self) -> None:
        """Let the feeds hand on the rest, LEAVE_SECONDS at most for all of them together."""
        end = time.monotonic() + LEAVE_SECONDS
        for feed in self._feeds:
            with contextlib.suppress(OSError):
                assert feed.stdin is not None
                feed.stdin.write(b"\n")
                feed.stdin.close()
        for feed in self._feeds:
            try:
                feed.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                feed.kill()
                feed.wait()


def _start(name: str, run: Run, attempt: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "relayrun.train.reporting.tracker_feed",
        name,
        f"--run-dir={run.path}",
        f"--attempt={attempt}",
        f"--parent={os.getpid()}",
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)


def attempt_hooks(
    run: Run,
    begin: AttemptStart,
    config: RunConfig,
    ranks: Ranks,
    model: ModelStage,
    optimizer: ScheduledOptimizer,
    *,
    timings: Timings,
    guard: LossGuard,
    metrics: Metrics,
    sections: SectionReporter,
) -> Hooks:
    """Make and set up the hooks of an attempt on this rank; called by all ranks together.

    Raises ConfigError on all ranks alike if one of `training.hooks` cannot be imported or made.
    """
    own = [timings, guard, metrics, *_reports(run, begin, config, ranks, model, metrics)]
    hooks = Hooks(own, import_hooks(config.training.hooks, ranks), ranks, sections)
    context = HookContext(
        run_dir=run.path,
        attempt=begin.attempt,
        config=config,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        say=metrics.say,
    )
    hooks.setup(context)
    return hooks


def _reports(
    run: Run, begin: AttemptStart, config: RunConfig, ranks: Ranks, model: ModelStage, metrics: Metrics
) -> Iterator[Hook]:
    """What this rank writes for people and other programs, besides the metrics."""
    if ranks.rank == 0:
        yield ProgressLog(
            run.progress,
            job_id=begin.job_id,
            ranks=ranks.world_size,
            flops_per_token=model.flops_per_token(),
            seq_length=config.training.seq_length,
        )
    if config.debug.profile is not None and ranks.rank in config.debug.profile_ranks:
        folder = run.debug_of(begin.attempt) / "profile"
        yield Profiler(config.debug, rank=ranks.rank, folder=folder, say=metrics.say)
    if ranks.rank == 0 and has_agent():
        yield FirstStepNotice()
    if ranks.rank == 0:
        yield TrackerProcesses(run, begin.attempt, config, metrics.say)
