"""Python stacks of ranks that hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir import node_health as of_ranks

COLLECTIVE = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
Current thread 0x00007f2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/relayrun/train/distributed.py", line 80 in maximum
"""
ASLEEP = """Current thread 0x00007f3 (most recent call first):
  File "/home/me/my_hooks.py", line 33 in sleep_on
  File "/relayrun/train/hook_list.py", line 12 in before_step
"""


@pytest.mark.parametrize(
    ("stacks", "late"),
    [
        ([COLLECTIVE, ASLEEP, COLLECTIVE], {1: "sleep_on (my_hooks.py:33)"}),
        ([COLLECTIVE, COLLECTIVE + ASLEEP], {1: "sleep_on (my_hooks.py:33)"}),  # asked twice
        ([COLLECTIVE, COLLECTIVE], {}),
        ([ASLEEP, ASLEEP], {}),  # nobody waits: the stacks do not tell
        ([COLLECTIVE, ""], {}),
        ([], {}),
    ],
)
def test_the_rank_that_others_wait_for_is_named_by_its_stack(
    tmp_path: Path, stacks: list[str], late: dict[int, str]
) -> None:
    for rank, text in enumerate(stacks):
        (tmp_path / f"rank-{rank:04}.txt").write_text(text)
    assert of_ranks.late_ranks(tmp_path) == late


def entry(name: str, number: int, group: str) -> dict[str, Any]:
    """Return what torch's flight recorder has of a collective."""
    numbers = {"collective_seq_id": number, "p2p_seq_id": number + 100, "is_p2p": name.endswith("send")}
    return {"profiling_name": name, "process_group": ["3", group], **numbers}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("nccl:all_reduce", 57, "TP"), entry("nccl:send", 2, "PP")], "all_reduce 57 of TP"),
        ([entry("nccl:send", 2, "PP"), entry("gloo:all_gather", 9, "")], "send 102 of PP"),
        ([entry("gloo:all_gather", 9, "")], "all_gather 9 of "),
        ([], None),
    ],
)
def test_the_oldest_unfinished_collective_is_named(
    tmp_path: Path, entries: list[dict[str, Any]], words: str | None
) -> None:
    (tmp_path / "collectives-0012.json").write_text(json.dumps(entries))
    assert of_ranks.unfinished_collectives(tmp_path) == ({} if words is None else {"12": words})


@pytest.mark.parametrize("text", ["", "[{", "{}", "[{}]", "[3]", "3", "\xff", '[{"is_p2p": false}]'])
def test_a_dump_that_is_none_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "collectives-0001.json").write_bytes(text.encode("latin-1"))
    assert of_ranks.unfinished_collectives(tmp_path) == {}
