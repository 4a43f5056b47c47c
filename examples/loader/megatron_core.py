"""megatron-core's schedule on the samples of a mixture, by their numbers (docs/how-to/loader.md).

megatron_core.py CONFIG FOLDER STEPS     # CONFIG: a YAML file with the settings of `data`; of shards alone
"""

import functools
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from relayrun import checkpoints
from relayrun.client import should_leave, should_save, step_done
from relayrun.loader import Loader
from relayrun.train.model.cpu_patches import patch_for_cpu

LENGTH, MICRO, BATCH = 64, 4, 8
config, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
patch_for_cpu()  # nothing where CUDA is there


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Return the losses of a micro-batch, and what makes its loss of them."""
    batch = next(batches)
    seen.append(batch["tokens"])
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    losses = model(batch["tokens"], batch["position_ids"], causal, labels=batch["labels"])
    return losses, functools.partial(mean_loss, batch["loss_mask"])


def mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach()}


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
torch.manual_seed(1)
size = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
transformer = TransformerConfig(
    **size, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm"
)
spec = get_gpt_layer_local_spec(normalization="RMSNorm")
model = GPTModel(transformer, spec, vocab_size=512, max_sequence_length=LENGTH)
model.model_type = ModelType.encoder_or_decoder
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
start = 0
if (found := checkpoints.newest(folder)) is not None:
    start, saved = found.step, torch.load(found.path / "state.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
loader = Loader(config, seq_length=LENGTH, batch_size=BATCH)
samples, _, _ = loader.megatron_provider()([last * BATCH, 0, 0])
numbers = range(start * BATCH, last * BATCH)  # samples are counted, so their count is their state
batches = iter(torch.utils.data.DataLoader(samples, batch_size=MICRO, sampler=numbers))
run = get_forward_backward_func()
seen: list[torch.Tensor] = []
for step in range(start + 1, last + 1):
    losses = run(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=BATCH // MICRO,
        seq_length=LENGTH,
        micro_batch_size=MICRO,
        forward_only=False,
    )
    optimizer.step()
    optimizer.zero_grad()
    loss = sum(each["loss"].item() for each in losses) / len(losses)
    step_done(step, loss=loss, samples=zlib.crc32(torch.cat(seen).numpy().tobytes()))
    seen.clear()
    leave = should_leave()
    if leave or should_save() or step % 10 == 0 or step == last:
        with checkpoints.saving(folder, step, keep_last=3) as path:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "state.pt")
    if leave:
        break
