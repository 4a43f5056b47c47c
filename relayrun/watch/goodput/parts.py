"""The parts into which every node-second of a run is booked, and what Google's ml-goodput calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartGroup = Literal["productive", "overhead", "start", "lost", "end", "unknown"]


@dataclass(frozen=True, kw_only=True)
class NodeTimePart:
    """One name under which time is booked."""

    name: str
    group: PartGroup
    words: str
    """What the nodes did, for people."""
    google: str
    """The `BadputType` of ml-goodput-measurement that this time counts to; empty: it is productive there."""


PARTS: tuple[NodeTimePart, ...] = (
    NodeTimePart(
        name="step",
        group="productive",
        words="forward, backward and update of steps whose result counts",
        google="",
    ),
    NodeTimePart(
        name="data",
        group="overhead",
        words="steps that count waited for their data",
        google="DATA_LOADING_SYNC",
    ),
    NodeTimePart(
        name="save",
        group="overhead",
        words="training stood still for a save",
        google="UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    ),
    NodeTimePart(
        name="evaluation", group="overhead", words="evaluations inside training", google="CUSTOM_BADPUT_EVENTS"
    ),
    NodeTimePart(
        name="between",
        group="overhead",
        words="between steps: looks for triggers, metrics, hooks",
        google="OTHER",
    ),
    NodeTimePart(
        name="spare",
        group="overhead",
        words="spare nodes waited to take the place of a lost one",
        google="OTHER",
    ),
    NodeTimePart(
        name="prolog",
        group="start",
        words="from the allocation to the first lines of the batch script",
        google="TPU_INITIALIZATION",
    ),
    NodeTimePart(
        name="supervisor",
        group="start",
        words="the supervisor looked where to go on from",
        google="TPU_INITIALIZATION",
    ),
    NodeTimePart(
        name="launch",
        group="start",
        words="modules, job.setup, container and task starter, until rank 0's program ran",
        google="TPU_INITIALIZATION",
    ),
    NodeTimePart(name="import", group="start", words="imports of the program", google="TRAINING_PREP"),
    NodeTimePart(
        name="init",
        group="start",
        words="the ranks met, data were checked, model and optimizer were made",
        google="TRAINING_PREP",
    ),
    NodeTimePart(
        name="load",
        group="start",
        words="the checkpoint was loaded",
        google="UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    ),
    NodeTimePart(
        name="compile",
        group="start",
        words="what an attempt's first step took beyond the median of the next ones",
        google="PROGRAM_STARTUP",
    ),
    NodeTimePart(
        name="redone",
        group="lost",
        words="steps whose result was lost, and computed again",
        google="WASTED_PROGRESS_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="failed start",
        group="lost",
        words="starts that did not come to their first step",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="hang",
        group="lost",
        words="nothing moved, until that was noticed",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="recovery",
        group="lost",
        words="from a failure to the end of the ranks, or back to a checkpoint",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="given up",
        group="lost",
        words="nodes that were lost, and whose job went on without them",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="no attempt",
        group="lost",
        words="jobs that had nodes and began no attempt",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="end",
        group="end",
        words="from the ranks' last word to the end of the allocation",
        google="OTHER",
    ),
    NodeTimePart(name="unknown", group="unknown", words="nobody knows", google="OTHER"),
)
"""In the order in which people read them."""

PART_NAMES: tuple[str, ...] = tuple(part.name for part in PARTS)
START_PARTS: frozenset[str] = frozenset(part.name for part in PARTS if part.group == "start")
LOST_PARTS: frozenset[str] = frozenset(part.name for part in PARTS if part.group == "lost")
WHOLE_ALLOCATION_PARTS: frozenset[str] = frozenset(
    {"prolog", "supervisor", "launch", "import", "no attempt", "end", "unknown"}
)
"""What spare nodes do as all others; in the rest they wait."""
