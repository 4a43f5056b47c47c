"""Every command of docs/how-to/export.md runs, and its section for a run config is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from relayrun.config.compose.schema import EvaluationSection
from tests.export.models import make_hf, make_run
from tests.readme import ROOT, checkout

PAGE = (ROOT / "docs/how-to/export.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_sections_of_a_run_config_are_sections() -> None:
    native, foreign = (EvaluationSection.model_validate(yaml.safe_load(text)["evaluation"]) for text in blocks("yaml"))
    assert native.tasks == ["hellaswag", "arc_easy"]
    assert foreign.convert[-1] == "{model}"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_command_runs(tmp_path: Path) -> None:
    environment = checkout(tmp_path)
    make_run(tmp_path / "logs/runs/my-project/my-run", make_hf(tmp_path / "original"), iteration=40)
    make_hf(tmp_path / "models/qwen2", "Qwen2")
    script = "set -euo pipefail\n" + "\n".join([*blocks("bash"), *blocks("bash mapping")])
    own = "PYTHONPATH=examples/export"
    assert own in script
    script = script.replace(own, f"{own}:{environment['PYTHONPATH']}")
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=1000
    )
    assert done.returncode == 0, done.stderr
    assert "mapping: qwen2:QWEN2" in (tmp_path / "models/qwen2-start/model.yaml").read_text()
    assert "logits of megatron-core and transformers on 256 tokens differ by at most" in done.stdout
    weights = [
        (tmp_path / folder / "model.safetensors").stat().st_size for folder in ("models/my-run", "models/my-run-40")
    ]
    assert weights[1] < 0.6 * weights[0]
    assert json.loads((tmp_path / "models/my-start/metadata.json").read_text())["sharded_backend"] == "torch_dist"

    (job,) = blocks("bash slurm")  # as the job runs it; tests/slurm lets Slurm do so
    spool = tmp_path / "spool"
    spool.mkdir()
    shutil.copy(tmp_path / "scripts/conversion/do-convert.sh", spool / "slurm_script")
    arguments = job.split()[2:]
    (spool / "scontrol").write_text(
        f"#!/bin/sh\necho '   Command={tmp_path}/scripts/conversion/do-convert.sh {' '.join(arguments)}'\n"
    )
    (spool / "scontrol").chmod(0o755)
    in_job = environment | {"SLURM_JOB_ID": "1", "PATH": f"{spool}:{environment['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", spool / "slurm_script", *arguments],
        cwd=tmp_path,
        env=in_job,
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models/my-run-job/config.json").is_file()
