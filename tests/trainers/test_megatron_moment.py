"""swiss-ai's ranks do not agree on a signal: it must reach all of them between the same two ends of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.trainers import megatron_lm_log as module
from relayrun.control.trainers.megatron_lm_log import MegatronDialect, MegatronProgram


class Clock:
    """Time that passes by sleeping alone, in which a program ends a step every `seconds`."""

    def __init__(self, log: Path, seconds: float) -> None:
        self.now = 1000.0
        self.log = log
        self.seconds = seconds
        self.ends = [1000.0]
        log.write_text("")
        self.say()

    def say(self) -> None:
        line = f" iteration {len(self.ends):8}/ 1000 | elapsed time per iteration (ms): {1000 * self.seconds} |\n"
        with self.log.open("a") as file:
            file.write(line)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds
        while self.ends[-1] + self.seconds <= self.now:
            self.ends.append(self.ends[-1] + self.seconds)
            self.say()

    def into(self) -> float:
        """Where in a step it is now, from 0 to 1."""
        return (self.now - self.ends[-1]) / self.seconds


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    def make(seconds: float, dialect: MegatronDialect = MegatronDialect.SWISS_AI) -> tuple[Clock, MegatronProgram]:
        clock = Clock(tmp_path / "log", seconds)
        monkeypatch.setattr(module, "time", clock)
        found = MegatronProgram(
            dialect=dialect,
            logs=[(str(clock.log), 0)],
            folder=tmp_path,
            trigger_folder=tmp_path / "triggers",
            total_steps=1000,
        )
        found.steps()
        return clock, found

    return make


@pytest.mark.parametrize("seconds", [0.3, 1.0, 7.0, 12.0, 90.0])
@pytest.mark.parametrize("later", [0.0, 0.02, 0.5, 0.97, 0.999])
def test_who_waits_comes_out_inside_a_step(make: object, seconds: float, later: float) -> None:
    clock, program = make(seconds)  # type: ignore[operator]
    clock.sleep(later * seconds)
    before = clock.now
    program.wait_inside_step()
    assert 0.02 * seconds <= clock.into() * seconds
    assert 0.02 <= clock.into() <= 0.98
    assert clock.now - before <= max(1.6 * seconds + 0.1, 4.0) if seconds < 10 else clock.now - before <= 4.0


def test_who_agrees_is_not_waited_for(make: object) -> None:
    clock, program = make(5.0, MegatronDialect.NVIDIA)  # type: ignore[operator]
    program.wait_inside_step()
    assert clock.now == 1000.0


def test_a_program_that_has_stopped_is_not_waited_for_long(make: object) -> None:
    clock, program = make(5.0)  # type: ignore[operator]
    clock.seconds = 1e9
    program.wait_inside_step()
    assert clock.now <= 1000.0 + 2.5 * 5 + 1.1


def test_the_save_trigger_comes_inside_a_step_too(make: object) -> None:
    clock, program = make(1.0)  # type: ignore[operator]
    assert program.ask_to_save() is None
    assert 0.3 <= clock.into() <= 0.7
