from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from relayrun.shards.indexed import Shard, ShardWriter

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/tokenization/submit_merge.sh"


def test_every_dump_is_merged_by_a_job_of_its_own_and_once(tmp_path: Path) -> None:
    for dump in range(2):
        for shard in range(3):
            writer = ShardWriter(tmp_path / "my text" / f"dump-{dump}" / f"0000{shard}_tokens", np.uint16)
            writer.add([dump, shard], [2])
            writer.finish()
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "sbatch"  # runs a copy of the script, as Slurm does
    fake.write_text(
        f'#!/bin/bash\necho "$@" >>"{tmp_path}/asked"\nwhile [[ $1 == --* ]]; do shift; done\n'
        f'cp "$1" "{tmp_path}/job"\nshift\nbash "{tmp_path}/job" "$@" >/dev/null && echo 42\n'
    )
    fake.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PATH_TO_LOGS": str(tmp_path / "logs"),
    }

    def submit() -> str:
        command = [shutil.which("bash") or "bash", str(SCRIPT), str(tmp_path / "my text")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert submit().splitlines()[:2] == ["dump-0: Slurm job 42", "dump-1: Slurm job 42"]
    for dump in range(2):
        merged = Shard.open(tmp_path / "my text-merge" / f"dump-{dump}-merged")
        assert np.asarray(merged.ids()).tolist() == [dump, 0, dump, 1, dump, 2]
    assert submit().splitlines()[:2] == ["dump-0: merged already", "dump-1: merged already"]
    assert len((tmp_path / "asked").read_text().splitlines()) == 2
