from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import InputError
from relayrun.tokens.shards.shard import Shard, ShardWriter
from relayrun.tokens.tokenize import dumps
from relayrun.tokens.tokenize.dumps import unmerged_dumps

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/tokenization/submit_merge.sh"


@pytest.mark.slow
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
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        return "".join(line for line in done.stdout.splitlines(True) if not line.startswith("warning: "))

    whole = (tmp_path / "my text/dump-1/00002_tokens.bin").read_bytes()
    os.truncate(tmp_path / "my text/dump-1/00002_tokens.bin", 2)
    assert submit().startswith(f"error: {tmp_path}/my text/dump-1/00002_tokens.bin: token file is torn")
    assert not (tmp_path / "asked").exists()  # nothing is queued, dump-0 neither
    assert not (tmp_path / "my text-merge").exists()
    (tmp_path / "my text/dump-1/00002_tokens.bin").write_bytes(whole)
    assert submit().splitlines()[:2] == ["dump-0: Slurm job 42", "dump-1: Slurm job 42"]
    for dump in range(2):
        merged = Shard.open(tmp_path / "my text-merge" / f"dump-{dump}-merged")
        assert np.asarray(merged.ids()).tolist() == [dump, 0, dump, 1, dump, 2]
    assert submit().splitlines()[:2] == ["dump-0: merged already", "dump-1: merged already"]
    assert len((tmp_path / "asked").read_text().splitlines()) == 2


def test_dumps_that_cannot_be_merged_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = tmp_path / "text"
    with pytest.raises(InputError, match="there is no dump in this folder"):
        unmerged_dumps(dataset)
    for dump, kinds in enumerate([(np.uint16, np.int32), (np.uint16, np.uint16), (np.int32, np.uint16)]):
        for shard, kind in enumerate(kinds):
            writer = ShardWriter(dataset / f"dump-{dump}" / f"{shard}", kind)
            writer.add([1, 2], [2])
            writer.finish()
    with pytest.raises(InputError, match=r"2 dumps cannot be merged:(?s:.*)dump-0/1: (?s:.*)dump-2/1: token types"):
        unmerged_dumps(dataset)
    for dump in (0, 2):
        for file in (dataset / f"dump-{dump}").glob("1.*"):
            file.unlink()
    assert unmerged_dumps(dataset) == ["dump-0", "dump-1", "dump-2"]
    monkeypatch.setattr(dumps, "free_space", lambda _: 100)
    with pytest.raises(InputError, match=r"text-merge: the merged shards take 0\.0 GB, and 0\.0 GB are free"):
        unmerged_dumps(dataset)
