"""The command that a launcher of the earlier system starts on each rank: the launcher runs, with stand-ins for Slurm.

`python -m tests.megatron_lm.seed_launcher CHECKOUT` writes it for the two launchers of swiss-ai/Megatron-LM 81d44dbe to
tests/megatron_lm/seed-llama3-{8b,70b}.json, so that the comparison needs no checkout.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SITE = "/iopsstor/scratch/cscs/"
"""Where the launchers of the earlier system have their checkout, before the user's name."""

STAND_INS = ("scontrol", "sbatch", "scancel", "nvidia-smi", "pip", "wandb", "rsync")


def started(launcher: Path, *, nodes: int, edits: dict[str, str] | None = None, **variables: str) -> list[str]:
    """The words that `srun` gives to each rank. `edits`: settings of the launcher's block, as somebody types them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tools = folder / "bin"
        tools.mkdir()
        for name in STAND_INS:
            _tool(tools / name, "exit 0")
        _tool(tools / "python3", "echo PREFIX_A PREFIX_B")  # create_data_config.py
        _tool(tools / "srun", f'printf %s "${{@: -1}}" >>{folder}/started; echo >>{folder}/started')
        checkout = folder / "user" / "Megatron-LM"
        checkout.mkdir(parents=True)
        text = launcher.read_text().replace(f"{SITE}$USER", f"{folder}/user")
        for name, value in (edits or {}).items():
            text, count = re.subn(rf"^{name}=\S*", f"{name}={value}", text, count=1, flags=re.M)
            assert count == 1, name
        script = folder / "launcher.sh"
        script.write_text(text)
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "USER": "user",
            "SLURM_NNODES": str(nodes),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NPROCS": str(4 * nodes),
            "SLURM_GPUS_PER_NODE": "4",
            "SLURM_CPUS_PER_TASK": "72",
            "SLURM_JOB_ID": "7",
            **variables,
        }
        subprocess.run(["bash", script], env=environment, cwd=folder, capture_output=True, check=True, timeout=600)
        last = (folder / "started").read_text().strip().splitlines()[-1]
        return shlex.split(last.replace(str(folder), "SITE"))


def _tool(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


NODES = {"8b": 16, "70b": 32}
EDITS: dict[str, dict[str, str]] = {
    "as it stands": {},
    "MOCK_DATA": {"MOCK_DATA": "true"},
    "NSYS_PROFILER": {"NSYS_PROFILER": "true"},
    "LOG_NCCL": {"LOG_NCCL": "true"},
    "sizes": {"MBS": "2", "GBS": "256", "SEQ_LEN": "4096", "TRAINING_STEPS": "1000", "CHECKPOINT_STEPS": "100"},
}
"""What somebody types into the settings block."""


def every(checkout: Path, size: str) -> dict[str, list[str]]:
    """The words of one launcher of a checkout for each of EDITS, and with a key of W&B."""
    launcher, nodes = checkout / f"submit-llama3-{size}.sh", NODES[size]
    found = {name: started(launcher, nodes=nodes, edits=edits) for name, edits in EDITS.items()}
    return found | {"W&B": started(launcher, nodes=nodes, WANDB_API_KEY="k")}


def stored(size: str) -> dict[str, list[str]]:
    """What `every` gave when somebody ran this module."""
    words: dict[str, list[str]] = json.loads((FOLDER / f"seed-llama3-{size}.json").read_text())
    return words


if __name__ == "__main__":
    for size in NODES:
        text = json.dumps(every(Path(sys.argv[1]), size), indent=1)
        (FOLDER / f"seed-llama3-{size}.json").write_text(text + "\n")
