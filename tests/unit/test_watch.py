from __future__ import annotations

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain.failure_reason import log_excerpt, log_tail
from relayrun.control.chain.watch import stall_limit
from relayrun.control.rundir.records import Heartbeat


def beat(phase: str, step: float | None = None, save: float | None = None, interval: float = 0.0) -> Heartbeat:
    return Heartbeat(node="n", iteration=1, phase=phase, time=0.0, step_p95=step, save_p95=save, interval=interval)


@pytest.mark.parametrize(
    ("beats", "limit"),
    [
        ([], 1800),
        ([beat("start")], 1800),
        ([beat("start"), beat("step")], 300),
        ([beat("step", step=1.0)], 300),
        ([beat("step", step=60.0)], 600),
        ([beat("save", step=1.0, save=90.0)], 900),
        ([beat("evaluation", step=40.0)], 400),
        ([beat("start", interval=60.0)], 1860),
        ([beat("step", step=1.0, interval=60.0)], 360),
        ([beat("step", step=1.0, save=90.0, interval=60.0)], 960),  # it may save since
        ([beat("step", step=60.0, interval=60.0), beat("step")], 660),
    ],
)
def test_an_attempt_stands_still_after_ten_times_the_usual_or_the_timeout(beats: list[Heartbeat], limit: float) -> None:
    assert stall_limit(beats, ChainSection(hang_timeout=300, start_timeout=1800)) == limit


def test_the_excerpt_of_a_log_has_its_last_lines_without_the_supervisors_own(tmp_path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "err"
    log.write_text("old attempt\n" + "[relayrun 2026] attempt 2\nTraceback\n\n  File x\nValueError: bad\n")
    assert log_excerpt(log_tail(str(log), since=len("old attempt\n"))) == "Traceback\n  File x\nValueError: bad"
    assert log_tail(str(tmp_path / "none")) == ""
    assert log_tail(None) == ""
