"""A checkout of Megatron-LM under torchrun alone, without relayrun, on CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from relayrun.control.trainers.megatron_lm_log import MegatronDialect, megatron_dialect_of
from tests.checkouts import ENVIRONMENT

LINE = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) .*? grad norm: (\S+) ")


def train_alone(
    words: Sequence[str],
    *flags: str,
    checkout: Path,
    ranks: int,
    save: Path,
    load: Path | None = None,
    environment: dict[str, str] | None = None,
) -> dict[int, tuple[str, str]]:
    """Run what a rank executes under torchrun; return loss and gradient norm of every iteration, as `steps` does."""
    triggers = save / "triggers"
    triggers.mkdir(parents=True, exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--no-python"]
    folders = ["--save", str(save), "--load", str(load or save)]
    if megatron_dialect_of(checkout) is MegatronDialect.SWISS_AI:
        folders += ["--trigger-path", str(triggers)]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", *words, *folders, *flags],
        cwd=checkout,
        env=os.environ | ENVIRONMENT | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    found = {
        int(iteration): (float(loss).hex(), float(norm).hex()) for iteration, loss, norm in LINE.findall(done.stdout)
    }
    assert found, done.stdout[-10_000:]
    return found
