"""Several ranks with checkpoints of their own, under torchrun: they agree when to leave (docs/how-to/command.md)."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from relayrun.client import checkpoint, should_leave, should_save

folder, last = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def agreed() -> tuple[bool, bool]:
    """Whether to save, and to leave: rank 0 asks, and its answer holds on every rank."""
    wish = torch.tensor([should_save(), should_leave()], dtype=torch.int32, device=device)
    dist.broadcast(wish, src=0)
    save, leave = wish.tolist()
    return bool(save), bool(leave)


def save_checkpoint(iteration: int) -> None:
    """Each rank writes its part; when all have, rank 0 writes the file that makes the checkpoint whole."""
    path = os.path.join(folder, f"step-{iteration}")
    os.makedirs(path, exist_ok=True)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
        torch.save(state, os.path.join(path, "model.pt"))
    torch.save(torch.get_rng_state(), os.path.join(path, f"rng-{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(path, "whole"), "w") as file:
            file.write(f"{dist.get_world_size()} ranks\n")


torch.manual_seed(1)
plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)  # every rank draws samples of its own
start = 0
if (path := checkpoint()) is not None:
    state = torch.load(os.path.join(path, "model.pt"), map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(torch.load(os.path.join(path, f"rng-{rank}.pt"), weights_only=True))
    start = state["iteration"]

for iteration in range(start + 1, last + 1):
    x = torch.randn(32, 8).to(device)
    loss = torch.nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {iteration}/{last} loss {mean.item() / dist.get_world_size()!r}", flush=True)
    save, leave = agreed()
    if save or leave or iteration % 50 == 0 or iteration == last:
        save_checkpoint(iteration)
    if leave:
        break
dist.destroy_process_group()
