"""Runs a script with torchtitan on CPUs, where it looks for the memory and the name of a GPU.

torchtitan 0.3 trains with FlexAttention alone, which has no backward pass on CPUs: torch's attention with the same mask
takes its place.

    python tests/torchtitan_on_cpu.py SCRIPT ARGUMENT ...
"""

import os
import runpy
import sys
from types import SimpleNamespace

import torch
import torch._utils
from torch.nn.attention.flex_attention import AuxOutput, create_mask
from torch.nn.functional import scaled_dot_product_attention

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None


def attention(query, key, value, *, block_mask, scale, enable_gqa, **options):  # type: ignore[no-untyped-def]
    sizes = query.shape[0], None, query.shape[2], key.shape[2]
    mask = create_mask(block_mask.mask_mod, *sizes, device="cpu")
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa), AuxOutput(None)


from torchtitan.distributed import utils  # noqa: E402  # behind the stand-ins
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

utils.set_pg_timeouts = lambda **options: None  # it asks for the number of a device
FlexAttention._compiled_flex_attn = attention
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
