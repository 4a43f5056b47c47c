"""Hooks of one attempt on one rank: `Hooks` calls relayrun's hooks, then those of `training.hooks`. Without torch."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.train import user_code
from relayrun.train.hooks import Action, Gradients, Hook, HookContext, HookFailed, UpdateVerdict
from relayrun.train.reporting.debugging import Profiler
from relayrun.train.reporting.liveness import FirstStepNotice, SectionReporter, has_agent
from relayrun.train.reporting.metrics import Metrics, ProgressLog
from relayrun.train.reporting.tracker_feed import TrackerProcesses

if TYPE_CHECKING:
    from relayrun.config.sections.training import HookEntry
    from relayrun.train.distributed import Ranks
    from relayrun.train.model.gpt import ModelStage

BETWEEN_STEPS = ("before_step", "after_step", "at_rollback", "after_save", "after_failed_save", "at_evaluation")
"""Methods whose time is `Step.hooks_seconds`; the time of `before_update` is part of the step."""


def report_hooks(
    run: Run, begin: AttemptStart, config: RunConfig, ranks: Ranks, model: ModelStage, metrics: Metrics
) -> Iterator[Hook]:
    """Yield the hooks of this rank that report an attempt: progress.txt, profiler, agent, trackers."""
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


def import_hooks(entries: Sequence[HookEntry], ranks: Ranks) -> list[tuple[str, Hook]]:
    """Import and instantiate the hooks of `training.hooks`; return them with their import paths. All ranks call it
    together.

    Raises ConfigError on all ranks if it fails on any.
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


def import_hook_class(entry: HookEntry) -> type[Hook]:
    """Return the class of a hook. Raises ConfigError if it cannot be imported, is no hook or lacks an option."""
    path = entry.hook
    try:
        found = user_code.import_user_object(path)
    except ConfigError as error:
        raise ConfigError(f"hook {error.message}") from error
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise ConfigError(f"hook {path} is no class that inherits relayrun.train.hooks.Hook")
    try:
        inspect.signature(found).bind(**entry.options)
    except TypeError as error:
        words = f"hook {path} cannot be made with the options {entry.options}: TypeError: {error}"
        raise ConfigError(words) from None
    return found


def _make(entry: HookEntry) -> Hook:
    path, found = entry.hook, import_hook_class(entry)
    try:
        made = found(**entry.options)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"hook {path} cannot be made with the options {entry.options}: {user_code.describe_error(error)}"
        ) from error
    if _overrides(made, "state_dict") != _overrides(made, "load_state_dict"):
        raise ConfigError(f"hook {path} has one of state_dict and load_state_dict without the other")
    return made


class Hooks(Hook):
    """Calls the hooks in order: relayrun's, then the user's. `hooks.py` says when and on which ranks.

    The methods of `Hook` that are not defined here call those of all hooks.
    """

    def __init__(
        self,
        own: Sequence[Hook],
        users: Sequence[tuple[str, Hook]],
        ranks: Ranks,
        sections: SectionReporter | None = None,
    ) -> None:
        """`users`: result of `import_hooks`. `sections`: reports when one of them runs."""
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
        for method in self._calls.keys() - vars(Hooks).keys():
            setattr(self, method, partial(self._call, method))
        keeping = [name for name, hook, _ in named if _overrides(hook, "state_dict")]
        self._save = dict(zip(keeping, self._calls["state_dict"], strict=True))
        self._load = dict(zip(keeping, self._calls["load_state_dict"], strict=True))
        self._initial: dict[str, dict[str, Any]] = {}
        self._say: Callable[[str], None] = lambda text: None
        self._may_differ = any(hook.may_differ for _, hook, _ in named if _overrides(hook, "before_update"))

    def setup(self, context: HookContext) -> None:
        """Set up all hooks, and keep their states as initial states for checkpoints without them."""
        self._say = context.say
        self._call("setup", context)
        self._initial = copy.deepcopy(self.state_dict())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of the hooks by name; write them at once, since the values are not copies."""
        states = {name: save() for name, save in self._save.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; other entries of `state` have no colon in their name.

        A removed or new hook is not an error: one line reports it.
        """
        for name in state:
            if ":" in name and name not in self._load:
                self._say(f"hook {name} has a state in this checkpoint and is not in training.hooks: it is left out")
        for name, load in self._load.items():
            if name not in state:
                self._say(f"hook {name} has no state in this checkpoint: it begins anew")
            load(state[name] if name in state else copy.deepcopy(self._initial.get(name, {})))

    def before_update(self, gradients: Gradients) -> UpdateVerdict:
        """Return the verdict of all hooks on all ranks."""
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

    def take_seconds(self) -> float | None:
        """Return the time of a user's hooks between steps since the last call; None without such hooks."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds if self._users else None

    def _call(self, method: str, *facts: object) -> None:
        for call in self._calls[method]:
            call(*facts)

    def _guarded(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
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
    """Raise TypeError for a value that a checkpoint cannot restore."""
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
