"""Patches that let megatron-core run without CUDA; with CUDA they do nothing.

megatron-core trains on gloo, but names CUDA in places that no option reaches. Each patch names the files that need it
(below megatron/core, in 0.16.1). If an option exists, it is used instead, see `model/gpt.py`: use_cpu_initialization,
no attention mask, no fusions. All patches act on this process only, which must be a training rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

_replace = setattr
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full")


def patch_for_cpu() -> None:
    """Apply the patches without CUDA. Call it once, before megatron-core builds anything."""
    if not torch.cuda.is_available():
        _devices()
        _factories()
        _random()
        _type_names()
        _streams()
        _splits()
        torch.compiler.set_stance("force_eager")  # a compiler may be missing, and takes longer than runs on CPUs


def _devices() -> None:
    """Make the CPU the current device, with nothing to wait for.

    models/common/embeddings/rotary_pos_embedding.py moves inverse frequencies there,
    distributed/param_and_grad_buffer.py allocates the gradient buffers there, and optimizer/distrib_optimizer.py,
    pipeline_parallel/p2p_communication.py and dist_checkpointing/ their receive buffers; the last two also synchronize.
    """
    cpu = torch.device("cpu")
    _replace(torch.cuda, "current_device", lambda: cpu)
    _replace(torch.cuda, "synchronize", lambda device=None: None)
    _replace(torch.cuda, "empty_cache", lambda: None)


def _factories() -> None:
    """Let device="cuda" of a tensor factory mean the CPU; `Tensor.cuda` is the identity.

    optimizer/optimizer.py (scale factors), optimizer/clip_grads.py (overflow buffer), pipeline_parallel/schedules.py
    (token counts), models/common/embeddings/rope_utils.py.
    """
    for name in _FACTORIES:
        _replace(torch, name, _on_cpu(getattr(torch, name)))
    _replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def _random() -> None:
    """Let the CUDA generator be the CPU's, from which dropout draws here.

    tensor_parallel/random.py keeps named states of "the CUDA generator" and swaps them in around dropout (`fork`). On a
    CPU a fork also moves the CPU generator, which its logger reports every time; that logger is silenced.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    def get(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    _replace(torch.cuda, "get_rng_state", get)
    _replace(torch.cuda, "manual_seed", torch.manual_seed)
    _replace(megatron_random, "_get_cuda_rng_state", get)
    _replace(megatron_random, "_set_cuda_rng_state", set_)
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)


def _type_names() -> None:
    """Let `Tensor.type()` return torch.cuda.*.

    optimizer/clip_grads.py, optimizer/distrib_optimizer.py and optimizer/optimizer.py compare this name to tell fp32
    from bf16, and know only the names of CUDA tensors.
    """
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, non_blocking, **kwargs)

    _replace(torch.Tensor, "type", type_)


class _Stream:
    """Stream of a device without streams: its work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def record_event(self, event: object = None) -> _Stream:
        """Return an object to wait for."""
        return self

    def synchronize(self) -> None:
        """Return at once."""


def _streams() -> None:
    """Provide streams with nothing to wait for.

    transformer/moe/token_dispatcher.py (alltoall) and transformer/moe/shared_experts.py copy to the host and compute
    shared experts on their own streams. distributed/distributed_data_parallel.py and
    distributed/param_and_grad_buffer.py reduce the gradients of several optimizer instances on a stream.
    """
    here = _Stream()
    _replace(torch.cuda, "Stream", _Stream)
    _replace(torch.cuda, "current_stream", lambda device=None: here)
    _replace(torch.cuda, "default_stream", lambda device=None: here)
    _replace(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def _splits() -> None:
    """Return the numbers of tokens per rank as numpy arrays, as after a copy from a GPU. transformer/moe/moe_utils.py
    converts only tensors of a GPU, and torch's all-to-all takes no tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    _replace(token_dispatcher, "maybe_move_tensor_to_cpu", to_host)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # for copies to a GPU
        return factory(*args, **kwargs)

    return make
