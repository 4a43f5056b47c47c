"""`progress.txt` in the run directory, in the form that Megatron-LM writes into its save folder (training.py there).

Fields are separated by tabs: local time, `Job ID: N`, `# GPUs: N`, then `Starting job`, or `Saved checkpoint`,
`Iteration: N`, `Job throughput: X TFLOP/s/GPU`, `Cumulative throughput: X TFLOP/s/GPU`,
`Floating-point operations: X` and `Tokens (in billions): X`. The job's throughput counts from its start, waiting
and saving included; the cumulative one from the start of the first job in a row with as many ranks, time in the
queue included.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from pathlib import Path

from relayrun.control.rundir.records import CheckpointCommit
from relayrun.train.hooks import Hook

log = logging.getLogger(__name__)

PROGRESS_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class ProgressLog(Hook):
    """Appends to the file, on rank 0; a disk that is full costs lines, nothing else."""

    def __init__(self, path: Path, *, job_id: str, ranks: int, flops_per_token: float, seq_length: int) -> None:
        self._path = path
        self._head = f"Job ID: {job_id}\t# GPUs: {ranks}"
        self._ranks = ranks
        self._seq_length = seq_length
        self._flops_per_token = flops_per_token
        self._began = self._first_start = time.time()
        self._flops_at_start = self._flops_at_first_start = 0.0

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        """Write that the job starts, with `consumed_samples` behind it."""
        self._began = time.time()  # loading the checkpoint is no training
        self._flops_at_start = self._flops(consumed_samples)
        self._first_start, self._flops_at_first_start = self._first_in_a_row()
        self._append("Starting job")

    def after_save(self, commit: CheckpointCommit) -> None:
        consumed_samples = commit.consumed_samples
        now, flops = time.time(), self._flops(consumed_samples)
        job = (flops - self._flops_at_start) / max(now - self._began, 1e-9) / self._ranks / 1e12
        cumulative = (flops - self._flops_at_first_start) / max(now - self._first_start, 1e-9) / self._ranks / 1e12
        self._append(
            f"Saved checkpoint\tIteration: {commit.iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\tFloating-point operations: {flops:.2e}\t"
            f"Tokens (in billions): {consumed_samples * self._seq_length / 1e9:.2f}"
        )

    def _flops(self, consumed_samples: int) -> float:
        return consumed_samples * self._seq_length * self._flops_per_token

    def _first_in_a_row(self) -> tuple[float, float]:
        """When the first of the last jobs with as many ranks started (seconds since 1970), and the work before it."""
        first: tuple[float, float] | None = None
        done = 0.0
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            fields = line.split("\t")
            try:
                same = int(fields[2].removeprefix("# GPUs: ")) == self._ranks
                if fields[3] == "Saved checkpoint":
                    done = float(fields[7].removeprefix("Floating-point operations: "))
                elif not same:
                    first = None
                elif first is None:
                    first = datetime.strptime(fields[0], PROGRESS_TIME_FORMAT).timestamp(), done
            except (IndexError, ValueError):  # a torn line
                continue
        return first or (self._began, self._flops_at_start)

    def _append(self, text: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(
                    f"{datetime.fromtimestamp(time.time()).strftime(PROGRESS_TIME_FORMAT)}\t{self._head}\t{text}\n"
                )
        except OSError as error:
            log.warning("%s not written: %s", self._path.name, error)
