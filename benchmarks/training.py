"""What the training program costs on top of megatron-core, and on a GPU how fast it is.

    python benchmarks/training.py [--pairs 10] [--steps 4]

CPU part: the loop as every rank runs it (`TrainingLoop.run`: reader, control, metrics, heartbeat, judging) against the
same megatron-core model and optimizer stepped bare on tensors that lie ready. Both in one process, on one rank with
one thread, in turns of --steps iterations, after one turn of each for warming up. The figure is the ratio of the CPU
times (`time.process_time`, all threads of the process). Dropout is off. About two minutes on an idle machine.

GPU part, where torch sees a GPU: the 1B baseline in bf16 on one GPU at sequence length 4096, by the training program as
it is submitted, in turns with a Llama of the same shape in plain PyTorch (`_plain_llama.py`); tokens/s, and the MFU
that the program reports (formula and peaks: relayrun/train/model/size.py). Every turn is a process of its own, its
first steps are left out. Without a GPU the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _results
import numpy as np

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import ModelSection, RunConfig
from relayrun.control.rundir import triggers
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError, run_main
from relayrun.files import read_json_lines
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import ShardWriter

SEED = 28
GPU_STEPS, GPU_WARM_UP, GPU_TURNS = 30, 10, 3
GPU_VOCABULARY, GPU_SEQ_LENGTH, GPU_BATCH = 128_256, 4096, 2
SMALL = {
    "model": {
        "num_layers": 5,
        "hidden_size": 192,
        "ffn_hidden_size": 576,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": False,
    },
    "training": {"micro_batch_size": 4, "global_batch_size": 8, "seq_length": 256, "threads": 1},
    "parallel": {"use_distributed_optimizer": True},
}
SMALL_VOCABULARY = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="iterations of a turn")
    parser.add_argument("--part", choices=("cpu", "ours", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "cpu":
        return in_turns(Run(options.folder), options.pairs, options.steps)
    if options.part == "plain":
        return plain()
    if options.part == "ours":
        return program(Run(options.folder))
    folder = Path(tempfile.mkdtemp(prefix="relayrun-training-"))
    try:
        run = make_run(folder, SMALL, SMALL_VOCABULARY, steps=(options.pairs + 1) * options.steps)
        figures = {"seed": SEED, "cpu": child("cpu", run.path, pairs=options.pairs, steps=options.steps)}
        figures["gpu"] = gpu(folder)
    finally:
        shutil.rmtree(folder)
    path = _results.write("training", figures)
    print(json.dumps(figures, indent=2))
    print(f"written to {path}")
    return 0


def child(part: str, folder: Path | None = None, **options: int) -> Any:
    """Run a part in a process of its own; its last line is JSON."""
    command = [sys.executable, __file__, f"--part={part}", *(f"--{name}={value}" for name, value in options.items())]
    command += [f"--folder={folder}"] if folder else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if part == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RelayrunError(f"the part {part!r} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_run(folder: Path, sections: dict[str, Any], vocabulary: int, *, steps: int) -> Run:
    """A run directory with random tokens and a begun attempt; nothing is saved before the end."""
    run = Run(folder / f"run-{vocabulary}-{time.monotonic_ns()}")
    for path in (run.config, run.checkpoints, run.attempt(1).path):
        path.mkdir(parents=True)
    triggers.create_trigger_folder(run)
    shard = run.path / "shard"
    writer = ShardWriter(shard, np.uint16 if vocabulary < 1 << 16 else np.int32)
    writer.add(np.random.default_rng(SEED).integers(0, vocabulary, 4_000_000), [1000] * 4000)
    writer.finish()
    Manifest.build({"train": [shard]}, {}, vocabulary_size=vocabulary, eod=0, tokenizer="none").write(run.manifest)
    config = RunConfig.model_validate(
        {
            "project": "benchmark",
            "name": "training",
            "data": {"tokenizer": "none", "datasets": ["none"]},
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"interval": 10**9},
            "job": {"time": "60"},
            "cluster": {"name": "benchmark", "scheduler": "local"},
            **sections,
            "training": sections["training"] | {"steps": steps, "seed": SEED},
        }
    )
    run.config_revision(1).write_text(yaml_file.dump_yaml(config.model_dump(mode="json")))
    AttemptStart(
        attempt=1,
        job_id="1",
        job_name="benchmark",
        nodes="localhost",
        config_revision=1,
        base_iteration=0,
        base_path=None,
        start_time=time.time(),
        job_end_time=None,
        grace_period=0.0,
    ).write(run.attempt(1).begin)
    return run


def one_rank() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def in_turns(run: Run, pairs: int, steps: int) -> int:
    """The CPU part: the real loop, held after every turn for as many bare steps."""
    one_rank()
    from relayrun.train import distributed, loop
    from relayrun.train.model import cpu_patches
    from relayrun.train.reporting.liveness import NodeHeartbeatWriter, RankTimings
    from relayrun.train.requests import SignalFlag

    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    config = resolve.read_resolved_config(run.config_revision(1))
    cpu_patches.patch_for_cpu()
    import torch

    torch.set_num_threads(1)
    ranks = distributed.start_process_groups(config)
    timings = RankTimings(begin)
    pulse = NodeHeartbeatWriter(run.attempt(1).heartbeats, node="localhost", active=True, iteration=0, timings=timings)
    training = loop.TrainingLoop(run, begin, config, ranks, SignalFlag(), timings, pulse)
    bare = bare_stepper(config, ranks)
    times: dict[str, list[float]] = {"loop": [], "bare": []}
    step, began = training._step, [time.process_time()]

    def turned() -> bool:
        done = step()
        if training.position.iteration % steps == 0:
            now = time.process_time()
            times["loop"].append(now - began[0])
            for _ in range(steps):
                bare()
            began[0] = time.process_time()
            times["bare"].append(began[0] - now)
        return done

    training._step = turned  # type: ignore[method-assign]
    began[0] = time.process_time()
    training.run()
    training.reader.close()
    assert len(times["loop"]) == pairs + 1
    mine, theirs = times["loop"][1:], times["bare"][1:]
    print(
        json.dumps(
            {
                "pairs": pairs,
                "steps_of_a_turn": steps,
                "tokens_of_a_step": 8 * 256,
                "parameters": training.model.parameters(),
                "loop_cpu_seconds_of_a_step": _results.spread([value / steps for value in mine]),
                "bare_cpu_seconds_of_a_step": _results.spread([value / steps for value in theirs]),
                "ratio": _results.spread([a / b for a, b in zip(mine, theirs, strict=True)]),
                "load_average": os.getloadavg()[0],
            }
        )
    )
    sys.stdout.flush()
    os._exit(0)


def bare_stepper(config: RunConfig, ranks: Any) -> Any:
    """One step of the same model and optimizer with megatron-core's own calls, and nothing else."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from relayrun.train.model.gpt import ModelStage as TrainingModel
    from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer

    settings = config.training
    model = TrainingModel(config, ranks, SMALL_VOCABULARY, eod=0)
    optimizer = ScheduledOptimizer(config, model)
    model.train_mode(True)
    count, length = settings.global_batch_size // settings.micro_batch_size, settings.seq_length
    generator = torch.Generator().manual_seed(SEED)
    shape = (count, settings.micro_batch_size, length + 1)
    tokens = torch.randint(SMALL_VOCABULARY, shape, generator=generator)
    positions = torch.arange(length).expand(settings.micro_batch_size, -1)

    def forward(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        losses = chunk(
            input_ids=batch[:, :-1].contiguous(),
            position_ids=positions,
            attention_mask=None,
            labels=batch[:, 1:].contiguous(),
        )
        return losses, lambda output: (output.float().mean(), {})

    def step() -> None:
        model.chunks[0].zero_grad_buffer()
        optimizer.inner.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(tokens),
            model=model.chunks,
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=settings.micro_batch_size,
            forward_only=False,
        )
        optimizer.inner.step()
        optimizer.schedule.step(increment=1)

    return step


def gpu(folder: Path) -> dict[str, Any]:
    """The GPU part, or why there is none."""
    probe = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    name = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip()
    if not name:
        return {"not_measured": "torch sees no GPU on this machine"}
    tokens = GPU_BATCH * GPU_SEQ_LENGTH
    sections = {
        "model": model_1b().model_dump(),
        "training": {
            "micro_batch_size": GPU_BATCH,
            "global_batch_size": GPU_BATCH,
            "seq_length": GPU_SEQ_LENGTH,
            "precision": "bf16",
            "manual_gc_interval": 500,
        },
        "parallel": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        "job": {"time": "60", "gpus_per_node": 1},
    }
    ours, peer, mfu, memory = [], [], [], 0
    for _ in range(GPU_TURNS):
        run = make_run(folder, sections, GPU_VOCABULARY, steps=GPU_WARM_UP + GPU_STEPS)
        lines = child("ours", run.path)
        shutil.rmtree(run.path)
        ours.append(statistics.median(line["tokens_per_second"] for line in lines))
        mfu.append(statistics.median(line["mfu"] for line in lines) if lines[0]["mfu"] is not None else None)
        memory = max(memory, *(line["memory_bytes"] for line in lines))
        peer.append(tokens / statistics.median(child("plain")))
    known = [value for value in mfu if value is not None]
    return {
        "device": name,
        "model": "llama3-1b",
        "seq_length": GPU_SEQ_LENGTH,
        "batch": GPU_BATCH,
        "steps_of_a_turn": GPU_STEPS,
        "turns": GPU_TURNS,
        "tokens_per_second": {"relayrun": _results.spread(ours), "plain_torch": _results.spread(peer)},
        "ratio": _results.spread([a / b for a, b in zip(ours, peer, strict=True)]),
        "mfu": _results.spread(known) if known else "the peak of this device is not in relayrun/train/model/size.py",
        "peak_memory_bytes": memory,
    }


def model_1b() -> ModelSection:
    path = places.shared_file("configs/models/llama3-1b.yaml")
    return ModelSection.model_validate(yaml_file.read_yaml(path).values["model"])


def program(run: Run) -> int:
    """The training program as every rank runs it; prints its metrics without the first steps."""
    one_rank()
    from relayrun.train import __main__ as training
    from relayrun.train.requests import SignalFlag

    sys.argv = ["relayrun.train", f"--run-dir={run.path}", "--attempt=1"]
    code = training.main(SignalFlag())
    lines = [line for line in read_json_lines(run.attempt(1).metrics) if "loss" in line]
    print(json.dumps(lines[GPU_WARM_UP:]))
    sys.stdout.flush()
    os._exit(code)


def plain() -> int:
    """The peer: prints the seconds of its steps."""
    from _plain_llama import seconds_per_step

    print(
        json.dumps(
            seconds_per_step(
                model_1b(),
                GPU_VOCABULARY,
                seq_length=GPU_SEQ_LENGTH,
                batch=GPU_BATCH,
                steps=GPU_STEPS,
                warm_up=GPU_WARM_UP,
            )
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
