"""Each state and reason of Slurm has a name; `slurm_reasons.txt` has the words of 22.05.8, 24.11.5 and 26.05.3."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.scheduler.slurm_commands import parse_job
from relayrun.control.scheduler.slurm_states import (
    ENDED_STATES,
    RUNNING_STATES,
    WAITING_STATES,
    is_blocked,
    is_unknown_state,
    reason_of,
)

REASONS = (Path(__file__).parent / "slurm_reasons.txt").read_text().split()
STATES = {
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "EXPEDITING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING", "PENDING", "RUNNING", "SUSPENDED"),
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    "OUT_OF_MEMORY",
}
SENTENCES = {
    "launch failed requeued held": "blocked",
    "launch_failure_limit_exceeded_requeued_held": "blocked",
    "user env retrieval failed requeued held": "blocked",
    "job_requeued_in_held_state": "blocked",
    "Reservation camp was deleted": "blocked",
    "Reservation_camp_is_invalid": "blocked",
    "ReqNodeNotAvail, UnavailableNodes:n[0-1]": "waits",
    "ReqNodeNotAvail, Reserved for maintenance": "waits",
    "Reservation_camp,_which_this_job_was_running_under,_has_ended": "ended",
}
"""What Slurm says in the place of a reason."""


def test_each_reason_has_a_name() -> None:
    assert [word for word in REASONS if reason_of(word).kind == "unknown"] == []
    assert len(REASONS) > 200
    assert reason_of("AWordOfSlurm99").kind == "unknown"


@pytest.mark.parametrize(("sentence", "kind"), SENTENCES.items())
def test_each_sentence_has_a_name(sentence: str, kind: str) -> None:
    assert reason_of(sentence).kind == kind


def test_each_state_is_of_one_kind() -> None:
    assert [state for state in STATES if is_unknown_state(state)] == []
    assert len(ENDED_STATES | WAITING_STATES | RUNNING_STATES) == sum(
        map(len, (ENDED_STATES, WAITING_STATES, RUNNING_STATES))
    )
    assert is_unknown_state("THAWING")
    assert not is_unknown_state("CANCELLED by 1000")
    assert not is_blocked("RUNNING", "JobHeldUser")


@pytest.mark.parametrize(
    ("reason", "by_slurm"),
    [("NodeDown", True), ("OutOfMemory", True), ("DeadLine", True), ("TimeLimit", True), ("None", False)],
)
def test_a_job_that_slurm_ends_by_itself_was_not_cancelled(reason: str, by_slurm: bool) -> None:
    line = f"JobId=7 JobName=j UserId=root(0) JobState=COMPLETING Reason={reason} Requeue=0 NodeList=n0 NumNodes=1"
    assert parse_job(line).ended_by_slurm is by_slurm
