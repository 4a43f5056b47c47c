"""A training loop whose data and checkpoints are relayrun's, in a chain or by itself (docs/how-to/loader.md).

plain.py CONFIG FOLDER STEPS          # CONFIG: a YAML file with the settings of `data`
"""

import json
import sys
import zlib

import torch

from relayrun import checkpoints
from relayrun.client import should_leave, should_save, step_done
from relayrun.loader import Loader

config, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(512, 32), torch.nn.Linear(32, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = Loader(config, seq_length=64, batch_size=8)
start = 0
if (found := checkpoints.newest(folder)) is not None:
    start, saved = found.step, torch.load(found.path / "state.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(json.loads((found.path / "data.json").read_text()))
for step in range(start + 1, last + 1):
    batch = next(loader)
    ids, labels = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"])
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step_done(step, loss=loss.item(), samples=zlib.crc32(batch["input_ids"].tobytes()))
    leave = should_leave()
    if leave or should_save() or step % 10 == 0 or step == last:
        with checkpoints.saving(folder, step, keep_last=3) as path:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "state.pt")
            (path / "data.json").write_text(json.dumps(loader.state_dict()))
    if leave:
        break
loader.close()
