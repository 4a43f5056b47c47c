"""Python stacks of ranks that hang."""

from __future__ import annotations

from pathlib import Path

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
