"""The hooks of one attempt on one rank: relayrun's own, then those of `training.hooks`; made and called here.

`TrackerProcesses` is rank 0's side of W&B and TensorBoard: it starts a process for each and ends it in time.

Nothing here may stop or slow training: what fails is said in one line. The feeds themselves are
`tracker_feed`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from relayrun.control.rundir.records import AttemptOutcome, CheckpointCommit
from relayrun.control.rundir.restarts import Rollback
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.train import user_code
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

if TYPE_CHECKING:
    from relayrun.config.sections.training import HookEntry
    from relayrun.train.distributed import Ranks

BETWEEN_STEPS = ("before_step", "after_step", "at_rewind", "after_save", "after_failed_save", "at_evaluation")
"""Methods whose time is `Step.hooks_seconds`; that of `before_update` is part of the step."""


class Sections(Protocol):
    """The part of `train.reporting.liveness.SectionReporter` that the hooks of a user need."""

    def within(self, section: str) -> AbstractContextManager[None]: ...


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
        sections: Sections | None = None,
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
