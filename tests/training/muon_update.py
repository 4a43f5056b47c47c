"""Run by test_training_own_optimizer.py: one step of Muon on one rank, beside what it should be. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from relayrun.config.sections.optimizer import OptimizerSection  # noqa: E402
from relayrun.train.optimizer import muon  # noqa: E402

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
QKV = (8, 4, 4)
SETTINGS = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "name": "muon",
    "muon_use_nesterov": True,
    "muon_scale_mode": "shape_scaling",
    "muon_fp32_matmul_prec": "highest",
}


def parameter(rows: int, columns: int, seed: int) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    made = torch.nn.Parameter(torch.randn(rows, columns, generator=generator))
    made.grad = torch.randn(rows, columns, generator=generator)
    return made


def stepped(kind: str | None, held: list[torch.nn.Parameter], **changes: object) -> list[torch.Tensor]:
    settings = OptimizerSection.model_validate(SETTINGS | changes)
    group = {"params": held, "is_expert_parallel": False} | ({"muon": kind} if kind else {})
    optimizer = muon.Muon([group], settings=settings, qkv=QKV)
    for _ in range(3):
        optimizer.step()
    return [each.detach().clone() for each in held]


def farthest(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


def double(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.double()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


SHAPES = ((24, 40), (40, 24), (32, 32))
torchs = [parameter(*shape, seed) for seed, shape in enumerate(SHAPES)]
theirs = torch.optim.Muon(torchs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
for _ in range(3):
    theirs.step()
ours = stepped("matrix", [parameter(*shape, seed) for seed, shape in enumerate(SHAPES)])
adams = [parameter(*shape, seed) for seed, shape in enumerate(SHAPES)]
adam = torch.optim.AdamW(adams, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
for _ in range(3):
    adam.step()
matrix = parameter(24, 40, 1).detach()
orthogonal = muon.orthogonalize(matrix, 5)
values = torch.linalg.svdvals(orthogonal)

qkv = parameter(32, 24, 7)
before = qkv.detach().clone()
after = stepped("qkv", [qkv], weight_decay=0.0, muon_momentum=0.0)[0]
rows = torch.arange(32).view(2, 16)
apart = torch.zeros_like(before)
for part in rows.split(QKV, dim=1):
    own = part.reshape(-1)
    apart[own] = muon.orthogonalize(qkv.grad[own], 5) * max(1.0, (len(own) / 24) ** 0.5)
for _ in range(3):
    before.add_(apart, alpha=-0.02)

results = {
    "from torch.optim.Muon": farthest(ours, [each.detach() for each in torchs]),
    "from AdamW": farthest(
        stepped(None, [parameter(*shape, seed) for seed, shape in enumerate(SHAPES)]), [each.detach() for each in adams]
    ),
    "from float64": (orthogonal - double(matrix)).abs().max().item(),
    "singular values": [values.min().item(), values.max().item()],
    "split qkv from the parts": (after - before).abs().max().item(),
}
print(json.dumps(results))
sys.stdout.flush()
os._exit(0)
