"""Hooks without training: the entries of `training.hooks`, what is called and what is not."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relayrun.config.sections.training import TrainingSection
from relayrun.errors import FatalTrainingError
from relayrun.train.hook_list import Hooks
from relayrun.train.hooks import Action, Gradients, Hook, HookFailed, StepStart, UpdateVerdict
from tests import warm

START = StepStart(iteration=1, consumed_samples=0, global_batch_size=8)
GRADIENTS = Gradients(iteration=1, loss=1.0, grad_norm=1.0, lr=1.0, consumed_samples=0, global_batch_size=8)


class OneRank:
    rank = 0

    def __init__(self) -> None:
        self.asked = 0

    def maximum(self, flags: list[int]) -> list[int]:
        self.asked += 1
        return flags


def settings(hooks: Any) -> TrainingSection:
    values = {"steps": 1, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 1, "hooks": hooks}
    return TrainingSection.model_validate(values)


def hooks(own: list[Hook], users: list[tuple[str, Hook]] | None = None, ranks: Any = None) -> Hooks:
    return Hooks(own, users or [], ranks or OneRank())


def test_an_entry_is_an_import_path_or_one_with_options() -> None:
    found = settings(["my_team.probes:Noise", {"hook": "a:B", "options": {"every": 3}}]).hooks
    assert [(entry.hook, entry.options) for entry in found] == [("my_team.probes:Noise", {}), ("a:B", {"every": 3})]
    again = settings(settings(["a:B"]).model_dump(mode="json")["hooks"])
    assert again.hooks == settings(["a:B"]).hooks, "as a resolved config has it"


@pytest.mark.parametrize("entry", ["noise", "a.b.C", "a:b:c", "a:", ":B", "a b:C", 3, {"options": {}}, {"hook": "a"}])
def test_what_is_no_import_path_is_refused_by_the_schema(entry: object) -> None:
    with pytest.raises(ValidationError, match="hooks"):
        settings([entry])


def test_a_hook_is_named_once() -> None:
    with pytest.raises(ValidationError, match="hooks names a:B twice"):
        settings(["a:B", {"hook": "a:B", "options": {"x": 1}}])


def test_only_what_is_overridden_is_called_own_hooks_first() -> None:
    called: list[str] = []

    class Noted(Hook):
        def __init__(self, name: str) -> None:
            self.called = name

        def before_step(self, start: StepStart) -> None:
            called.append(self.called)

    class Idle(Hook):
        pass

    made = hooks([Idle(), Noted("own")], [("a:B", Noted("first")), ("a:C", Idle()), ("a:D", Noted("second"))])
    made.before_step(START)
    assert called == ["own", "first", "second"]
    assert {method: len(calls) for method, calls in made._calls.items() if calls} == {"before_step": 3}


@pytest.mark.parametrize(("may_differ", "asked"), [(True, 1), (False, 0)])
def test_the_gravest_verdict_counts_and_ranks_agree_only_where_they_may_differ(may_differ: bool, asked: int) -> None:
    class Says(Hook):
        def __init__(self, verdict: UpdateVerdict | None) -> None:
            self.verdict = verdict
            self.may_differ = may_differ

        def before_update(self, gradients: Gradients) -> UpdateVerdict | None:
            return self.verdict

    ranks = OneRank()
    own = Says(UpdateVerdict(Action.SKIP, "spike"))
    made = hooks([own], [("a:B", Says(None)), ("a:C", Says(UpdateVerdict(Action.STOP)))], ranks)
    assert made.before_update(GRADIENTS) == UpdateVerdict(Action.STOP, "a:C: stop")
    assert ranks.asked == asked
    assert hooks([own]).before_update(GRADIENTS) == UpdateVerdict(Action.SKIP, "spike")
    assert hooks([own], [("a:B", Says(UpdateVerdict(Action.SKIP, "x")))]).before_update(GRADIENTS).reason == "spike"


def test_a_fatal_error_of_a_hook_stays_one_and_any_other_fails_the_attempt() -> None:
    class Raises(Hook):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def before_step(self, start: StepStart) -> None:
            raise self.error

    with pytest.raises(FatalTrainingError, match=r"^hook a:B, before_step: no use$"):
        hooks([], [("a:B", Raises(FatalTrainingError("no use")))]).before_step(START)
    with pytest.raises(HookFailed, match=r"^hook a:B, before_step: OSError: full \(.*hooks.py, line \d+\)"):
        hooks([], [("a:B", Raises(OSError("full")))]).before_step(START)
    with pytest.raises(KeyboardInterrupt):
        hooks([], [("a:B", Raises(KeyboardInterrupt()))]).before_step(START)
    with pytest.raises(OSError, match=r"^full$"):
        hooks([Raises(OSError("full"))]).before_step(START)


def test_a_verdict_is_a_verdict() -> None:
    class Says(Hook):
        def before_update(self, gradients: Gradients) -> Any:
            return "skip"

    with pytest.raises(HookFailed, match="hook a:B, before_update: TypeError: returned str instead of a Verdict"):
        hooks([], [("a:B", Says())]).before_update(GRADIENTS)


def test_the_protocol_imports_the_standard_library_alone() -> None:
    """Timings are hooks, and are measured before torch and pydantic are imported."""
    code = "import sys, relayrun.train.hooks; print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert result.stdout == "set()\n"


class Stubborn(Hook):
    def at_end(self, left: Any) -> None:
        raise OSError("the service is away")


LEAVES = """
import types
from unittest.mock import Mock
from relayrun.train.hook_list import Hooks
from relayrun.train.hooks import HookFailed
from relayrun.train.loop import TrainingLoop
from tests.train.test_training_hooks import OneRank, Stubborn

made = types.SimpleNamespace(
    position=types.SimpleNamespace(iteration=7),
    control=Mock(),
    saver=Mock(saved_iteration=5, save_before_leaving=Mock(return_value=None)),
    hooks=Hooks([], [("team:Stubborn", Stubborn())], OneRank()),
)
try:
    TrainingLoop._leave(made, "exit", "asked")
except HookFailed as error:
    print(error.message.split(" (")[0], made.control.acknowledge.called)
"""


@pytest.mark.slow
def test_an_exit_is_not_answered_where_a_hook_fails_at_the_end(tmp_path: Path) -> None:
    """Or the next attempt, which no trigger reaches any more, would train on."""
    (tmp_path / "leaves.py").write_text(f"import sys\nsys.path[:0] = [{str(warm.ROOT)!r}]\n{LEAVES}")
    done = warm.run([sys.executable, tmp_path / "leaves.py"])
    assert done.stdout == "hook team:Stubborn, at_end: OSError: the service is away False\n", done.stderr


def test_a_state_that_a_checkpoint_would_not_give_back_is_refused() -> None:
    class Keeps(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"t": (defaultdict(int, a=1),)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(HookFailed, match=r"state\['t'\]\[0\] is a defaultdict"):
        hooks([], [("a:Keeps", Keeps())]).state_dict()
