"""The commands and names of docs/reference/operators.md, and of the probe, are those of the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from relayrun import cli
from tests.readme import blocks

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = (ROOT / "docs/reference/operators.md").read_text(encoding="utf-8")
CLUSTERS = (ROOT / "docs/how-to/clusters.md").read_text(encoding="utf-8")
QUEUE = r"""
/runs/p/one/job.sbatch
/runs/p/one/fallback.sbatch
/runs/p/two/job.sbatch
/home/ada/launchers/submit-llama3-8b.sh
/runs/p/one/evaluations/evaluation.sbatch
(null)
"""


def test_the_commands_stop_each_chain_once_as_its_owner(tmp_path: Path) -> None:
    programs = {
        "squeue": f'[[ "$*" == "--user=ada --noheader --format=%o" ]] && cat <<"END"{QUEUE}END\n',
        "sudo": '[[ "$1 $2" == "-u ada" ]] && exec "${@:3}"\n',
        "relayrun": 'echo "$*"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    listed, stopped = (
        subprocess.run(["bash", "-euc", block], env=environment, capture_output=True, text=True, check=True).stdout
        for block in blocks("bash operator", OPERATORS)
    )
    assert listed == "/runs/p/one\n/runs/p/two\n"
    assert stopped == "stop /runs/p/one\nstop /runs/p/two\n"


def test_the_probe_of_the_page_and_its_facts() -> None:
    (block,) = blocks("bash probe", CLUSTERS)
    assert callable(cli.parse(shlex.split(block)[1:]).run)
    section = OPERATORS.partition("## What a probe writes")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)}
    source = (ROOT / "relayrun/lab/site_probe.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in source for name in named - {"probed"})
    shown = re.search(r"probed: (.*)", CLUSTERS)
    assert shown is not None
    assert {each.partition(":")[0] for each in shown[1].split("; ")} <= named
