"""The same command twice at once, for every command that writes: which test shows it, and those of small files here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayrun import cli
from tests.megatron_lm.stand_in import stand_in
from tests.publish.commands import COMMANDS, Command, Place, serve

ROOT = Path(__file__).resolve().parents[2]
LOOKS = "it only looks, or writes its own cache"
SUBMITS = "tests/submit/test_submission_refused.py::test_a_second_submit_at_the_same_time_is_refused"
CAMPAIGNS = "tests/chain/test_campaign.py::test_eight_who_look_at_once_begin_each_run_once"
TRIGGERS = "two touch one file"
SHOWN_BY = {
    "submit": SUBMITS,
    "resume": SUBMITS,
    "launch": SUBMITS,
    "wrap": SUBMITS,
    "sweep submit": CAMPAIGNS,
    "sweep resume": CAMPAIGNS,
    "stages submit": CAMPAIGNS,
    "stages resume": CAMPAIGNS,
    "sweep stop": "a file of one word, by a rename",
    "stages stop": "a file of one word, by a rename",
    "save": TRIGGERS,
    "stop": TRIGGERS,
    "cancel": TRIGGERS,
    "dumps dedup": "tests/tokens/test_dedup.py::test_nobody_prepares_or_deduplicates_meanwhile",
    "dumps submit": "each dump is tokenized under the lock of `dumps tokenize`",
    "dumps tune": "it measures in a temporary folder with its owner's name",
    "dumps verify": "it moves marks of dumps, each by a rename",
    "checkpoint commit": "a file by a rename, and a line that is appended",
    "checkpoint verify": "its record is a line that is appended",
    "gpu-check": "a page and a file of figures, each by a rename",
    "drill": "its runs are submitted: the lock of a submit",
    "trial": "its run is submitted: the lock of a submit",
    "site probe": "a job of each, and the site file by a rename",
    "sentinel": "tests/watch/test_sentinel_command.py::test_two_do_not_look_at_once_and_one_that_hangs_is_said",
    "notify test": "it writes nothing",
    "notify send": "tests/chain/test_notices_kept.py::test_two_processes_do_not_send_the_same",
    "check": LOOKS,
    "config": LOOKS,
    "explain": LOOKS,
    "diff": LOOKS,
    "data show": LOOKS,
    "data ledger": LOOKS,
    "data diff": LOOKS,
    "data overlap": LOOKS,
    "forecast": LOOKS,
    "data why": LOOKS,
    "metrics": "a file by a rename",
    "dumps size": LOOKS,
    "dumps status": LOOKS,
    "mixture prefixes": LOOKS,
    "mixture verify": LOOKS,
    "help": LOOKS,
    "status": LOOKS,
    "why": LOOKS,
    "sweep status": LOOKS,
    "stages status": LOOKS,
    "goodput": LOOKS,
    "runs list": LOOKS,
    "logs": LOOKS,
}
"""What shows that two at once do no harm, of the commands that neither the table of `commands.py` nor `HERE` has."""
HERE = {
    "init": "init OUT/p --cluster local",
    "adopt": "adopt IN/launcher.sh --checkout IN/megatron --output OUT/adopted.yaml",
    "dumps example": "dumps example --output-folder OUT/x --megabytes 4",
}
"""Commands that this file runs, by their names."""
LAUNCHER = """#!/bin/bash
#SBATCH --account=a1 --nodes=1 --ntasks-per-node=1 -t 1:00:00 -J my-model
ARGS=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
  --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1.0e-3 --save /nowhere/c --load /nowhere/c
  --save-interval 10 --data-path /data/a)
srun python pretrain_gpt.py ${ARGS[@]}
"""


def leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yield the names of a command's subcommands, or its own."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name
    for action in below:
        for word, each in action.choices.items():
            yield from leaves(each, f"{name} {word}")


def test_each_command_is_in_the_table_or_has_a_test_or_a_reason() -> None:
    every = set()
    for name in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        cli.adder(name)(parser)
        every |= set(leaves(parser, name))
    table = {name for name in every for command in COMMANDS.values() if f"{command.arguments} ".startswith(f"{name} ")}
    assert every - table == SHOWN_BY.keys() | (HERE.keys() - table)
    for reason in SHOWN_BY.values():
        if "::" in reason:
            path, _, test = reason.partition("::")
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), reason


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with serve(tmp_path_factory.mktemp("two"), "text") as found:
        original = found.folder / "original"
        (original / "launcher.sh").write_text(LAUNCHER)
        stand_in(original / "megatron")
        yield found


NOTHING = Command("", "", "", "")


def tree(place: Place) -> dict[str, str]:
    """Return what lies at the outputs, without the times and names of processes in records and logs."""
    found = place.tree()
    return {name: value if not name.endswith((".json", ".jsonl")) else "" for name, value in found.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name != "init" else []) for name in HERE]
)
def test_of_two_at_once_both_leave_what_one_leaves(place: Place, name: str) -> None:
    place.fresh(NOTHING)
    code, words = place.run(HERE[name])
    assert code == 0, words
    expected = tree(place)
    assert expected
    place.fresh(NOTHING)
    both = [place.end(started) for started in [place.start(HERE[name]) for _ in range(2)]]
    assert 0 in [code for code, _ in both], both
    for code, words in both:
        assert "Traceback" not in words
        assert code == 0 or "another process" in words or "exists already" in words, words
    assert tree(place) == expected
