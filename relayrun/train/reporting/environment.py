"""What compute_environment.txt says: in what an attempt ran, for the person who asks months later.

The environment is shown by an allowlist. Should a secret of the environment stand elsewhere (a command line, a
difference of the code), it is blotted out there, and so is what has the form of a token.
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
from relayrun.masking import mask_tokens
from relayrun.train.reporting.gpus import node_gpus

SHOWN_VARIABLES = re.compile(
    r"(SLURM|CUDA|CUBLAS|NVIDIA|NCCL|TORCH|OMP|MKL|FI|UCX|MPI|MPICH|PMI|GLOO|NVTE|TRITON|RELAYRUN)_[A-Z0-9_]+"
    r"|PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|HOSTNAME|TMPDIR|LANG"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS|JWT|CREDENTIAL|AUTH", re.I)
"""A variable with this in its name is never shown with its value. SLURM_JWT is one."""
COMMAND_SECONDS = 60.0
"""How long a command that is asked may take."""
SHORTEST_SECRET = 8
"""Characters of the shortest value that is blotted out: a shorter one cannot be told from ordinary text."""


def describe_environment(
    config: RunConfig, begin: AttemptStart, *, root: Path, job_script: Path, environment: Mapping[str, str]
) -> str:
    """Return the whole text of compute_environment.txt. `root` is the folder of the code that runs."""
    commit, difference = code_version(root)
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
        "GPUs": "\n".join(gpu.line() for gpu in node_gpus()) or "none that NVML shows",
        "packages": "\n".join(installed_packages()),
        "environment": "\n".join(shown_variables(environment)),
    }
    text = "".join(f"== {name}\n{content.rstrip()}\n\n" for name, content in sections.items())
    return without_secrets(text, environment)


def shown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return `NAME=value` of the variables that may be shown, by name."""
    return [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if SHOWN_VARIABLES.fullmatch(name) and not SECRET_NAMES.search(name)
    ]


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """`text` with the values of variables that sound secret replaced by their names, and tokens by what they are."""
    for name, value in environment.items():
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"<{name}>")
    return mask_tokens(text)[0]


def code_version(root: Path) -> tuple[str, str]:
    """Return commit and difference of the code in `root`: a git checkout, or a snapshot, which has both beside it."""
    record, difference = root.with_suffix(".commit"), root.with_suffix(".diff")
    if record.is_file():
        return _file_text(record).strip(), _file_text(difference)
    git = ["git", "-C", str(root)]
    commit = _asked([*git, "rev-parse", "HEAD"]).strip()
    return (commit, _asked([*git, "diff", "HEAD"])) if commit else ("unknown: this is no git checkout", "")


def installed_packages() -> list[str]:
    """`name==version` of all that is installed."""
    found = {(entry.metadata["Name"] or "").lower(): entry.version for entry in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def container_description(srun_options: Sequence[str], command: Sequence[str] = ()) -> str:
    """Return what the site's options and the command before the program say of a container, with its file."""
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
    """What a command prints; empty where it is not there or fails."""
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
