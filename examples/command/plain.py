"""A training loop of plain PyTorch that may be cut anywhere and goes on exactly (docs/how-to/command.md)."""

import os
import sys

import torch

from relayrun.client import checkpoint, checkpoint_done, should_leave, should_save, step_done

folder, last = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = 0
if (path := checkpoint()) is not None:
    state = torch.load(path, weights_only=True)
    start = state["iteration"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])

for iteration in range(start + 1, last + 1):
    x = torch.randn(32, 8)
    loss = torch.nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step_done(iteration, loss=loss.item())
    leave = should_leave()
    if leave or should_save() or iteration % 50 == 0 or iteration == last:
        path = os.path.join(folder, f"step-{iteration}.pt")
        state = {"iteration": iteration, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"rng": torch.get_rng_state()}, path + ".new")
        os.replace(path + ".new", path)
        checkpoint_done(iteration, path)
    if leave:
        break
