"""Stands before the training program as a command prefix, and changes one thing in it:
`python -m tests.training.variants CHANGE -- PYTHON -m relayrun.train ARG...`
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any


def compare_gradients() -> None:
    """Every norm and every clipped gradient is compared with megatron-core's own; rank 0 counts them aloud."""
    import torch
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    from relayrun.train.optimizer import megatron_optimizer

    total_norm, clip = megatron_optimizer.gradient_norm, megatron_optimizer.clip_gradients

    def compared_norm(optimizer: Any, device: torch.device) -> float:
        norm, megatrons = total_norm(optimizer, device), float(optimizer.get_grad_norm())
        if norm.hex() != megatrons.hex():
            raise AssertionError(f"norm {norm!r} is not megatron-core's {megatrons!r}")
        return norm

    def compared_clip(optimizer: Any, *, maximum: float, norm: float) -> None:
        held = [parameter for inner in optimizer.chained_optimizers for parameter in inner.get_parameters()]
        before = [parameter.grad.clone() for parameter in held]
        clip(optimizer, maximum=maximum, norm=norm)
        megatrons = [SimpleNamespace(grad=gradient.clone()) for gradient in before]
        clip_grad_by_total_norm_fp32(megatrons, max_norm=maximum, total_norm=norm)
        changed = 0
        for parameter, old, theirs in zip(held, before, megatrons, strict=True):
            if not torch.equal(parameter.grad, theirs.grad):
                raise AssertionError("a clipped gradient is not megatron-core's")
            changed += not torch.equal(parameter.grad, old)
        if os.environ["RANK"] == "0":
            print(f"compared: {len(held)} gradients, {changed} clipped", flush=True)

    megatron_optimizer.gradient_norm, megatron_optimizer.clip_gradients = compared_norm, compared_clip


def fuse_adamw() -> None:
    """AdamW is fused as on GPUs, with torch's kernel for CPUs; a rank says that it has run."""
    import torch

    from relayrun.train.optimizer import megatron_optimizer

    kernel: Any = torch._fused_adamw_

    def told(*arguments: Any, **named: Any) -> Any:
        print("the fused kernel has run", flush=True)
        return kernel(*arguments, **named)

    vars(torch)["_fused_adamw_"] = told
    patch = megatron_optimizer.patch_distributed_optimizers

    def patch_and_fuse(inner: Any) -> None:
        patch(inner)
        megatron_optimizer.use_fused_adam(inner)

    megatron_optimizer.patch_distributed_optimizers = patch_and_fuse


def report_host_memory() -> None:
    """Each rank says what its copies of saves take: as they are, and pinned."""
    from relayrun.train.checkpoint import async_writer

    layout = async_writer.lay_out_buffers

    def told(sizes: Any, piece: int) -> Any:
        places, lengths = layout(sizes, piece)
        if lengths:
            print(f"reserved: {sum(lengths)} bytes, {sum(async_writer.pinned_bytes(lengths))} pinned", flush=True)
        return places, lengths

    async_writer.lay_out_buffers = told


def keep_pipeline_outputs() -> None:
    """Stages keep what they have sent until its backward pass."""
    from relayrun.train.model import gpt

    made = gpt._transformer_config

    def keeping(*arguments: Any) -> Any:
        config = made(*arguments)
        config.deallocate_pipeline_outputs = False
        return config

    gpt._transformer_config = keeping


def count_waits() -> None:
    """Rank 0 says how often each iteration reads a tensor on the host, or waits for the device.

    On CPUs nothing tells a tensor of the device from one of the host, so all count but for agreements between the
    hosts of the ranks.
    """
    import torch

    from relayrun.train import distributed, loop

    counted = 0
    paused = False
    step, gather = loop.TrainingLoop._step, distributed.Ranks.gather

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal counted
            counted += not paused
            return original(*arguments, **named)

        setattr(owner, name, wrapped)

    def counted_step(self: Any) -> bool:
        nonlocal counted
        if self.position.iteration == 0:  # the shim for CPUs is there
            for name in ["item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"]:
                counting(torch.Tensor, name)
            counting(torch.cuda, "synchronize")
            counting(distributed, "wait_for_device")
        counted = 0
        result: bool = step(self)
        if os.environ["RANK"] == "0":
            print(f"waits: {self.position.iteration} {counted}", flush=True)
        return result

    def host_gather(self: Any, value: Any) -> list[Any]:
        nonlocal paused
        paused = True
        try:
            return gather(self, value)
        finally:
            paused = False

    loop.TrainingLoop._step = counted_step
    distributed.Ranks.gather = host_gather


def reduce_too_early() -> None:
    """Gradients of the output layer that were deferred come after their reduction has begun, as in megatron-core."""
    from megatron.core.distributed import finalize_model_grads

    from relayrun.train.model import kernels

    kernels.reduce_output_layer_last = lambda chunk: finalize_model_grads


def stand_in_fused_adam() -> None:
    """What TransformerEngine's Adam would do is done by a stand-in."""
    from tests.training import fused_adam

    fused_adam.install()


def main() -> None:
    change = globals()[sys.argv[1].replace("-", "_")]
    module = sys.argv.index("relayrun.train")
    sys.argv = sys.argv[module:]
    change()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
