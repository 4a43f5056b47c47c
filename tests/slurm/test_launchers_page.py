"""The commands of docs/how-to/launchers.md, on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run
from relayrun.tokens.shards.shard import Shard
from tests.readme import ROOT, blocks, checkout, tokenize
from tests.workspace import ends

from .cluster import TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.long
def test_dumps_and_a_chain_as_jobs(cluster: TestCluster, tmp_path: Path) -> None:
    environment = checkout(tmp_path)
    tokenize(tmp_path, environment, "my-code")
    cluster.run(
        [
            "scripts/tokenization/prepare_dumps.py",
            "--dataset-folder",
            "data/my-text",
            "--preprocessing-metadata-folder",
            "data/my-text-dumps",
            "--n-dumps",
            "2",
        ],
        cwd=tmp_path,
        env=environment | {"PATH": cluster.env["PATH"]},
    )
    training, tokenization = blocks("bash slurm", (ROOT / "docs/how-to/launchers.md").read_text(encoding="utf-8"))
    environment = environment | {"PATH": cluster.env["PATH"]}
    cluster.run(["bash", "-euo", "pipefail", "-c", tokenization], cwd=tmp_path, env=environment)
    cluster.wait_until(lambda: not cluster.queue(), timeout=360)
    output = tmp_path / "data/tokens/my-tokenizer/my-text"
    assert len(list(output.glob("dump-[01]/*.idx"))) == 4
    assert sum(Shard.open(str(path)[:-4]).documents for path in output.glob("*/*.idx")) == 800

    settings = {
        "DATASETS": str(output),
        "TOKENIZER": "data/tokenizer",
        "TRAINING_STEPS": "25",
        "SEQ_LEN": "64",
        "AUTO_JOB_REQUEUE": "true",  # the job's two minutes are not enough on a machine that is busy
    }
    heldout = tmp_path / "demo-output/tokens/demo"
    heldout.mkdir(parents=True)
    (heldout / "heldout").symlink_to(tmp_path / "data/tokens/my-tokenizer/my-code")
    cluster.run(["bash", "-euo", "pipefail", "-c", training], cwd=tmp_path, env=environment | settings)
    cluster.wait_until(lambda: not cluster.queue(), timeout=1000)
    run = Run(tmp_path / "logs/runs/relayrun/demo-slurm")
    causes = [end.cause for end in ends(run)]
    assert causes == ["saved"] * (len(causes) - 1) + ["done"]
