"""Search for the largest micro-batch that fits: doubled until memory is out, or halved until it fits.

Model and optimizer are those of a training run, made once; each size trains two iterations, and the second is timed.
One rank searches: a rank that runs out of memory alone would leave the others waiting, and several ranks share the
optimizer's state, so a size that fits one rank fits all.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import torch

from relayrun.config.compose import resolve
from relayrun.lab.gpucheck.programs.common import RankProgram, wait_for
from relayrun.lab.gpucheck.programs.search import MicroBatchTry, is_out_of_memory, search_micro_batch
from relayrun.train import distributed
from relayrun.train.model import cpu_patches
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer

MAX_MEMORY_SHARE = 0.95
"""Share of a GPU's memory that torch may reserve: the rest is left for CUDA, NCCL and temporary buffers."""


class MicroBatchTrainer:
    """The model of a training run, with a variable micro-batch."""

    def __init__(self, program: RankProgram) -> None:
        self._config = resolve.require_native(resolve.read_resolved_config(Path(program.options.config)))
        self._ranks = distributed.start_process_groups(self._config)
        self._vocabulary = self._config.data.mock_vocabulary_size
        self._model = ModelStage(self._config, self._ranks, self._vocabulary)
        self._optimizer = ScheduledOptimizer(self._config, self._model)
        self._model.train_mode(True)
        self._count = program.setup.sizes.micro_batches
        self._generator = np.random.default_rng(28)

    def attempt(self, micro_batch: int) -> MicroBatchTry:
        """Train two iterations; out of memory is a result, not an error."""
        device, length = self._ranks.device, self._config.training.seq_length
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        shape = (micro_batch, length + 1)
        batches = [
            MicroBatch(tokens=self._generator.integers(0, self._vocabulary, shape, dtype=np.int64))
            for _ in range(self._count)
        ]
        found: MicroBatchTry = {"micro_batch": micro_batch, "fits": False}
        try:
            for _ in range(2):
                started = time.perf_counter()
                self._step(batches)
                wait_for(device)
                seconds = time.perf_counter() - started
            found |= {"fits": True, "tokens_per_second": micro_batch * length * self._count / seconds}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found["words"] = str(error).splitlines()[0][:200]
        # outside of `except`: the error references the frames, and they reference the tensors
        found["peak_bytes"] = distributed.peak_memory(self._ranks)
        if on_gpu:
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
            found["fits"] &= (
                found["reserved_bytes"] <= MAX_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
            )
        self._optimizer.zero_grad()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        return found

    def _step(self, batches: list[MicroBatch]) -> None:
        self._optimizer.zero_grad()
        self._model.run(batches, train=True)
        self._optimizer.step(self._optimizer.prepare())


def search_largest_batch() -> None:
    """Search, and write every try as soon as it is done."""
    program = RankProgram.begin("config", "first")
    cpu_patches.patch_for_cpu()
    trainer = MicroBatchTrainer(program)
    tries: list[MicroBatchTry] = []

    def attempt(micro_batch: int) -> MicroBatchTry:
        tries.append(trainer.attempt(micro_batch))
        program.write({"tries": tries})
        return tries[-1]

    search_micro_batch(int(program.options.first), program.setup.sizes.largest_batch, attempt)
    distributed.stop_process_groups()


if __name__ == "__main__":
    search_largest_batch()
