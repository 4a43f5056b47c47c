"""Export of a checkpoint to a Hugging Face folder, and comparison of transformers' logits with megatron-core's."""

from __future__ import annotations

import time
from pathlib import Path

from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck.programs.common import RankProgram
from relayrun.train.export import compare_logits, huggingface
from relayrun.train.export.source_and_target import find_checkpoint


def export_and_compare() -> None:
    """Export the newest checkpoint of `--run-dir` to `--folder`, and compare logits."""
    program = RankProgram.begin("run-dir", "folder")
    source = find_checkpoint(Run(Path(program.options.run_dir)))
    folder = Path(program.options.folder)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    made = huggingface.write_huggingface(source, folder, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)
    exported = time.perf_counter()
    found = compare_logits.compare_logits(source, folder)
    program.write(
        {
            "parameters": made.parameters,
            "type": made.dtype,
            "tokens": found.tokens,
            "difference": found.difference,
            "largest": found.largest,
            "equal": found.equal,
            "export_seconds": exported - started,
            "compare_seconds": time.perf_counter() - exported,
        }
    )


if __name__ == "__main__":
    export_and_compare()
