"""Writes random tokens and a checkpoint's logits of them, as its checkout of Megatron-LM computes them, to $LOGITS."""

from __future__ import annotations

import contextlib
import os
from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model
from pretrain_gpt import model_provider

with contextlib.suppress(ImportError):  # of newer checkouts
    from gpt_builders import gpt_builder

    model_provider = partial(model_provider, gpt_builder)
initialize_megatron()
models = get_model(model_provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
load_checkpoint(models, None, None)
tokens = torch.randint(250, (2, 64), generator=torch.Generator().manual_seed(0))
later = torch.ones(64, 64, dtype=torch.bool).triu(1)[None, None]
with torch.no_grad():
    logits = models[0].eval().float()(tokens, torch.arange(64).expand(2, -1), later)
torch.save({"tokens": tokens, "logits": logits.float()}, os.environ["LOGITS"])
