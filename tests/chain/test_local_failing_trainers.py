"""Failures of relayrun's own trainer and of Megatron-LM through the real job script, as `relayrun why` tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.watch.why import explain
from tests.chain.test_local_training import submit
from tests.checkouts import checkout_of, plan
from tests.workspace import Workspace, ends

from .conftest import MakeRun
from .test_local_errors import run_chain

pytestmark = [pytest.mark.slow, pytest.mark.long]

SETUP = {
    "a shard that is cut": (
        "truncate -s 1000 {data}/shard1.bin",
        "shard1",
        ("configuration", "file system", "program"),
    ),
    "a shard that has gone": ("rm {data}/shard2.idx", "shard2", ("configuration", "file system", "program")),
    "few open files": ("ulimit -n 24", "Too many open files", ("configuration",)),
    "a package that lies before torch": (
        "mkdir -p {data}/p/torch && echo 'raise ImportError(\"no backend\")' > {data}/p/torch/__init__.py\n"
        "export PYTHONPATH={data}/p:$PYTHONPATH",
        "no backend",
        ("configuration",),
    ),
    "little virtual memory": ("ulimit -v 1100000", "", ("configuration",)),
    "a line before the ranks": ("source /no/such/environment", "/no/such/environment", ("configuration",)),
}
FLAGS = {
    "heads that do not divide": (["--num-attention-heads", "5"], "", ("program", "configuration")),
    "no such shards": (["--data-path", "/no/such/prefix"], "/no/such/prefix", ("configuration",)),
    "more parallel than ranks": (["--tensor-model-parallel-size", "3"], "divisible", ("program", "configuration")),
    "a batch that does not divide": (["--micro-batch-size", "3"], "divisible", ("program", "configuration")),
    "positions for shorter windows": (["--max-position-embeddings", "32"], "", ("program", "configuration")),
    "a checkpoint that is not there": (
        ["--load", "/no/such", "--exit-on-missing-checkpoint"],
        "--exit-on-missing-checkpoint",
        ("configuration",),
    ),
    "a flag of another version": (["--use-flash-attn-9"], "--use-flash-attn-9", ("configuration",)),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SETUP)
def test_the_first_cause_of_a_failing_run(tmp_path: Path, name: str) -> None:
    line, words, whose = SETUP[name]
    workspace = Workspace.make(tmp_path)
    setup = line.format(data=tmp_path / "data").split("\n")
    changes = {"chain": {"auto_requeue": False, "start_timeout": 120}, "job": {"setup": setup}}
    submit(workspace.config("run", cluster={"python": None}, **changes))
    run = workspace.run("run")
    assert ends(run)[0].cause in ("failed", "fatal")
    found = explain(run, 1)
    assert (words in found.quote, found.whose in whose, found.certainty) == (True, True, "seen"), found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FLAGS)
def test_the_first_cause_of_a_failing_megatron(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    flags, words, whose = FLAGS[name]
    chain = ChainSection(auto_requeue=False, fallback_job=False, node_health="off", start_timeout=120)
    run, made = make_run(**plan(checkout_of(MegatronDialect.SWISS_AI), tmp_path, *flags, steps=4, chain=chain))
    run_chain(run, made)
    assert ends(run)[0].cause in ("failed", "fatal")
    found = explain(run, 1)
    assert (words in found.quote, found.whose in whose, found.certainty) == (True, True, "seen"), found
