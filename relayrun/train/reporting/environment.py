"""Environment of an attempt for compute_environment.txt, and the node's GPUs as nvidia-smi reports them.

Environment variables are shown by an allowlist. Values of secret variables elsewhere in the text (a command line, a
diff), and everything that looks like a token, are masked.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.trainers.megatron_lm import checkout_state
from relayrun.masking import SECRET_WORD, mask_tokens

SHOWN_VARIABLES = re.compile(
    r"(SLURM|CUDA|CUBLAS|NVIDIA|NCCL|TORCH|OMP|MKL|FI|UCX|MPI|MPICH|PMI|GLOO|NVTE|TRITON|RELAYRUN)_[A-Z0-9_]+"
    r"|PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|HOSTNAME|TMPDIR|LANG"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
COMMAND_SECONDS = 60.0
"""Time limit of a command."""
SHORTEST_SECRET = 8
"""Length of the shortest value that is masked: a shorter one looks like ordinary text."""


def describe_environment(
    config: RunConfig, begin: AttemptStart, *, root: Path, job_script: Path, environment: Mapping[str, str]
) -> str:
    """Return the text of compute_environment.txt. `root`: folder of the running code."""
    commit, difference = checkout_state(root)
    packages = {(entry.metadata["Name"] or "").lower(): entry.version for entry in importlib.metadata.distributions()}
    sections = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.orig_argv),
        "job": f"{begin.job_id} ({begin.job_name}), attempt {begin.attempt}, config revision {begin.config_revision}",
        "nodes": begin.nodes,
        "job script": f"{job_script}\n{_file_text(job_script)}",
        "container": container_description(
            [*config.cluster.srun_options, *config.cluster.container.srun_options], config.cluster.container.command
        ),
        "code": f"{root}\ncommit {commit}",
        "difference to the commit": difference or "none",
        "machine": f"{platform.platform()}, Python {platform.python_version()}",
        "GPUs": "\n".join(map(gpu_line, node_gpus())) or "none that nvidia-smi shows",
        "packages": "\n".join(f"{name}=={version}" for name, version in sorted(packages.items())),
        "environment": "\n".join(shown_variables(environment)),
    }
    text = "".join(f"== {name}\n{content.rstrip()}\n\n" for name, content in sections.items())
    return without_secrets(text, environment)


def shown_variables(environment: Mapping[str, str]) -> list[str]:
    return [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if SHOWN_VARIABLES.fullmatch(name) and not SECRET_WORD.search(name)
    ]


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` with the values of secret variables replaced by their names, and tokens by their kinds."""
    for name, value in environment.items():
        if SECRET_WORD.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"<{name}>")
    return mask_tokens(text)[0]


def container_description(srun_options: Sequence[str], command: Sequence[str] = ()) -> str:
    """Return the container options and files in the site's srun options and command."""
    found = [shlex.join(command)] if command else []
    for option in srun_options:
        name, _, value = option.partition("=")
        if name.startswith("--container") or name == "--environment":
            found.append(option)
            file = Path(value)
            if value and file.suffix in (".toml", ".edf", ".yaml", ".json") and file.is_file():
                found.append(_file_text(file))
    return "\n".join(found) or "none"


def _asked(command: Sequence[str]) -> str:
    """Return the output of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"not readable: {error.strerror}"


GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "memory_used": "memory.used",
    "memory_total": "memory.total",
    "sm_clock": "clocks.sm",
    "sm_clock_max": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "power": "power.draw",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}
"""Fields of `node_gpus`, each with its name in `nvidia-smi --query-gpu`; MiB, MHz, watts, degrees Celsius. A device
reports `[N/A]` for what it does not have."""


def node_gpus() -> list[dict[str, str]]:
    """Return the fields of each GPU of this node; empty without nvidia-smi."""
    fields = ",".join(GPU_FIELDS.values())
    lines = _asked(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]).splitlines()
    return [dict(zip(GPU_FIELDS, line.split(", "), strict=True)) for line in lines if ", " in line]


def gpu_line(gpu: Mapping[str, str]) -> str:
    """Return a GPU in one line for people."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in gpu.items())
