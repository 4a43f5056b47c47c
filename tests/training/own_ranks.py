"""Programs of tests that are a process for each rank and speak with each other, without a run around them."""

from __future__ import annotations

import sys
from pathlib import Path

from relayrun.control.scheduler.local_srun import free_port
from tests import warm


def run(module: str, folder: Path, ranks: int, last: str, *, timeout: float = 600) -> list[Path]:
    """Run `python -m MODULE RANK RANKS PORT LAST` for each rank; what each has printed lies in the files returned."""
    port = free_port()
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            command = [sys.executable, "-m", module, str(rank), str(ranks), str(port), last]
            processes.append(warm.start(command, stdout=log.fileno(), stderr=log.fileno()))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join(path.read_text()[-4000:] for path in logs)
    return logs
