"""A Llama in plain PyTorch, as one writes it by hand: the peer that `training.py` measures against on a GPU.

Attention by SDPA (flash attention on a GPU), weights in fp32 under bf16 autocast, fused AdamW, torch.compile.
Equations of arXiv 2407.21783; of the shapes of a `relayrun.config.compose.schema.ModelSection`. Rotary frequencies
are unscaled:
that costs nothing either way.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as functional
from torch import nn

from relayrun.config.compose.schema import ModelSection


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.heads, self.groups = model.num_attention_heads, model.num_query_groups
        hidden, head = model.hidden_size, model.hidden_size // model.num_attention_heads
        self.attention_norm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(hidden, model.norm_epsilon)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * head, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * model.ffn_hidden_size, bias=False)
        self.down = nn.Linear(model.ffn_hidden_size, hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: [batch, sequence, hidden]; rotation: cosines and sines, [sequence, head]."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, self.heads + 2 * self.groups, -1).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], dim=1)
        attended = functional.scaled_dot_product_attention(
            rotated(q, *rotation), rotated(k, *rotation), v, is_causal=True, enable_gqa=self.heads != self.groups
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class PlainLlama(nn.Module):
    """Mean loss of a batch of token ids, [batch, sequence + 1]."""

    def __init__(self, model: ModelSection, vocabulary_size: int, seq_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.output = nn.Linear(model.hidden_size, vocabulary_size, bias=False)
        if not model.untie_embeddings_and_output_weights:
            self.output.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=model.init_method_std)
        head = model.hidden_size // model.num_attention_heads
        frequencies = model.rotary_base ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(seq_length), frequencies).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        rotation = self.cosines.to(x.dtype), self.sines.to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, head], turned by its position; the halves of a head are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


def seconds_per_step(
    model: ModelSection,
    vocabulary_size: int,
    *,
    seq_length: int,
    batch: int,
    steps: int,
    warm_up: int,
    device: str = "cuda",
) -> list[float]:
    """Train on random tokens; the seconds of each step after `warm_up` ones. On a GPU in bf16, compiled."""
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    plain = PlainLlama(model, vocabulary_size, seq_length).to(device)
    compiled = torch.compile(plain) if on_gpu else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    tokens = torch.randint(vocabulary_size, (4, batch, seq_length + 1), device=device)
    found = []
    for step in range(warm_up + steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            loss = compiled(tokens[step % 4])
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        loss.item()  # waits for the GPU
        if step >= warm_up:
            found.append(time.perf_counter() - started)
    return found
