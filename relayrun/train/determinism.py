"""`training.deterministic` in a rank: the same bits at every run of the same layout with the same versions.

What it changes on a GPU:

| part | without | with |
|---|---|---|
| products of matrices | cuBLAS may take another algorithm | workspaces of a fixed size, as torch demands |
| sums over ranks | rings, trees, switches: NCCL's choice | rings, whose order is fixed |
| torch's SDPA | cuDNN's kernel on Hopper; gradients added with atomics | flash and memory-efficient kernels, in order |
| TransformerEngine's attention | any of its kernels | those that are deterministic in the backward pass |
| embeddings | gradients added with atomics | `weight[ids]`, whose gradients torch sorts first |
| kernels of torch.compile | reductions cut as measured | cut in one way |
| what torch has no deterministic kernel for | runs | raises RuntimeError, which names it |

torch's flag does all that its kernels do, megatron-core's deterministic_mode the embeddings, and variables of the
environment (`relayrun.config.compose.determinism`) the rest. Megatron-LM also refuses fused cross entropy and the overlap of
tensor-parallel communication; relayrun uses neither. On CPUs everything is deterministic without: there only the
embeddings change.
"""

from __future__ import annotations

import os

import torch

from relayrun.config.compose import determinism
from relayrun.config.compose.schema import RunConfig


def enable_determinism(config: RunConfig) -> None:
    """Turn it on in this process where the config asks for it. To be called before the first use of CUDA and NCCL.

    Raises ConfigError if the environment of this rank takes determinism away.
    """
    if not config.training.deterministic:
        return
    determinism.check_deterministic_environment(os.environ, where="environment of the rank")
    for name, value in determinism.deterministic_variables(config).items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # the flag alone also fills all new memory: that finds who reads what was never written, and costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
