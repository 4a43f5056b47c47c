"""Each kernel of training once: `python -m relayrun.lab.gpucheck.programs.kernels try_every_kernel`.

A row calls one kernel as training does, and compares the result with the same computed otherwise. A defect of one row
does not reach the others: an error of CUDA, after which no kernel runs in this process, ends it with a line in its log,
and the part starts the program again for the rows that are left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from relayrun.lab.gpucheck.programs import attention
from relayrun.lab.gpucheck.programs.common import RankProgram, run_measurement, wait_for
from relayrun.train.checkpoint.async_writer import HostCopy

Kernel = Callable[[RankProgram], dict[str, Any]]
"""Returns the figures of a row: `words` says what was seen. Raises any error if the kernel is wrong."""


class NeedsGpu(Exception):
    """The row says nothing without a GPU."""


def require_cuda(program: RankProgram) -> None:
    if program.device.type != "cuda":
        raise NeedsGpu("needs a GPU")


def compiled_kernel(program: RankProgram) -> dict[str, Any]:
    """Call a function that torch.compile fuses, as megatron-core's bias, dropout and activation."""
    require_cuda(program)

    def gated(gate: torch.Tensor, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * value + residual

    parts = [torch.randn(512, 1024, device=program.device) for _ in range(3)]
    started = time.perf_counter()
    found = torch.compile(gated)(*parts)
    wait_for(program.device)
    seconds = time.perf_counter() - started
    torch.testing.assert_close(found, gated(*parts))
    return {"words": f"compiled in {seconds:.1f} s"}


def fused_adam(program: RankProgram) -> dict[str, Any]:
    """Update by AdamW in one kernel; compare with the same on the host."""
    require_cuda(program)
    generator = torch.Generator().manual_seed(28)
    start, gradient = (torch.randn(4096, generator=generator) for _ in range(2))
    found = []
    for device in (program.device, torch.device("cpu")):
        weight = torch.nn.Parameter(start.to(device))
        weight.grad = gradient.to(device)
        adam = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=device.type == "cuda")
        for _ in range(3):
            adam.step()
        found.append(weight.detach().cpu())
    torch.testing.assert_close(*found)
    return {"words": "equal to the host's but for rounding"}


def pinned_copy(program: RankProgram) -> dict[str, Any]:
    """Copy a state into pinned memory as a save does; compare bytes."""
    size = program.setup.sizes.copied_at_most // 4
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=program.device)
    copy = HostCopy(program.device)
    shards = [
        ShardedTensor.from_rank_offsets(f"part{n}", piece) for n, piece in enumerate(torch.split(source, size // 4))
    ]
    started = time.perf_counter()
    copy.reserve(shards)
    reserved = time.perf_counter()
    stream = copy.new_stream()
    copy.fill(shards, stream)
    seconds = time.perf_counter() - reserved
    if not torch.equal(torch.cat([shard.data for shard in shards]), source.cpu()):
        raise ValueError("the copy in host memory has other bytes")
    words = f"{size / 1e9 / seconds:.3g} GB/s, after {reserved - started:.2g} s of pinning {size / 1e9:.3g} GB"
    return {"words": words, "bytes_per_second": size / seconds, "pin_seconds": reserved - started}


FORKED = """if True:
    import os
    from relayrun.train import fork_server
    fork_server.import_program()
    pid = os.fork()
    if not pid:
        import torch
        total = float((torch.ones(1000, device="cuda") * 2).sum()) if torch.cuda.is_available() else 2000.0
        os._exit(int(total != 2000.0))
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def fork_server(program: RankProgram) -> dict[str, Any]:
    """Import the training program, fork, and use CUDA in the fork."""
    started = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"the fork ended with {done.returncode}").splitlines()[-1])
    return {"words": f"a fork used the device; {time.perf_counter() - started:.1f} s with the imports"}


KERNELS: dict[str, tuple[str, Kernel]] = {
    "compiler": ("a kernel by torch.compile (C compiler, Python.h)", compiled_kernel),
    "adam": ("AdamW in one kernel", fused_adam),
    **{name: (words, partial(attention.measure_way, name=name)) for name, words in attention.WAYS.items()},
    "pinned": ("a save's copy to pinned memory", pinned_copy),
    "fork": ("CUDA in a fork of the fork server", fork_server),
}
"""Description and function by name of the row, in their order."""


def try_every_kernel() -> None:
    """Try the rows that `--skip` does not name; write each result at once."""
    program = RankProgram.begin("skip")
    skipped = set(program.options.skip.split(","))
    found: dict[str, Any] = {}
    for name, (what, kernel) in KERNELS.items():
        if name in skipped:
            continue
        program.write(found | {name: {"what": what, "failed": "the process died in it"}})
        started = time.perf_counter()
        try:
            made = kernel(program)
        except NeedsGpu as error:
            made = {"not_measured": str(error)}
        except Exception as error:  # torch raises many types; try the others
            lines = str(error).strip().splitlines() or [""]
            made = {"failed": f"{type(error).__name__}: {lines[0]}"[:400]}
        found[name] = {"what": what, **made, "row_seconds": time.perf_counter() - started}
        program.write(found)
        try:
            wait_for(program.device)
        except RuntimeError as error:
            found[name]["failed"] = f"{str(error).splitlines()[0]}"[:400]
            program.write(found)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_measurement(try_every_kernel)
