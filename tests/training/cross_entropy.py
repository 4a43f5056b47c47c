"""Run by test_training_cross_entropy.py on one rank or two: the loss of `compiled.py`, beside megatron-core's.

Arguments: rank, ranks, file of the store. Rank 0 prints the largest differences of losses and gradients as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402

from relayrun.train.model import compiled, cpu_patches  # noqa: E402

rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
cpu_patches.patch_for_cpu()
compiled.PIECE_ELEMENTS = 700  # several pieces, the last one shorter

SEQUENCE, BATCH, VOCABULARY = 11, 3, 96
generator = torch.Generator().manual_seed(28)
whole = 8 * torch.randn(SEQUENCE, BATCH, VOCABULARY, generator=generator)
whole[0, 0] += 300  # the largest logit is taken off before exponentials
labels = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
whole[1, 0, VOCABULARY // 2 :] = -torch.inf  # all that the last of two ranks has
labels[0, 1] = 3
weights = torch.rand(BATCH, SEQUENCE, generator=generator)
found = {}
for dtype in (torch.float32, torch.bfloat16):
    part = whole.chunk(ranks, dim=-1)[rank].to(dtype).contiguous()
    logits, other = part.clone().requires_grad_(), part.clone().requires_grad_()
    losses = compiled.language_model_loss(labels, logits)
    expected = vocab_parallel_cross_entropy(other.clone(), labels.transpose(0, 1).contiguous()).transpose(0, 1)
    torch.autograd.backward([(losses * weights).sum(), (expected * weights).sum()])
    assert losses.dtype == torch.float32
    assert logits.grad is not None
    assert other.grad is not None
    assert logits.grad.dtype == dtype
    differences = torch.tensor([(losses - expected).abs().max(), (logits.grad - other.grad).abs().max()])
    torch.distributed.all_reduce(differences, op=torch.distributed.ReduceOp.MAX)
    found[str(dtype)] = [*differences.tolist(), float(expected.max())]
if rank == 0:
    print(json.dumps(found), flush=True)
os._exit(0)  # torch may abort when Python ends with a process group
