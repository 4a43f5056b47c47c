"""The kernel of torch for sequences of any length (`torch.nn.attention.varlen`): all documents in one call, on GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from relayrun.train.model.documents import PackedDocuments


def varlen_options(known: Iterable[str], *, grouped: bool, window: int | None = None) -> tuple[dict[str, Any], bool]:
    """Return how to ask for causal attention, by the names of the function's arguments, which changed between versions.

    Also whether it takes groups of keys and values as they are; else there has to be one for every head. `window`: how
    many tokens before itself a token sees; None: all.
    """
    left = -1 if window is None else window
    causal: dict[str, Any] = {"window_size": (left, 0)} if "window_size" in known else {"is_causal": True}
    takes = "enable_gqa" in known
    return causal | ({"enable_gqa": True} if takes and grouped else {}), takes


@cache
def varlen_function() -> Callable[..., Any] | None:
    """The function of this torch; None where it has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn
    return found


def varlen_usable(query: torch.Tensor, *, window: int | None = None) -> bool:
    """Whether it has a kernel for this device and type, and for a window: that of flash attention, for 16 bits."""
    call = varlen_function()
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16) or call is None:
        return False
    if window is not None and "window_size" not in inspect.signature(call).parameters:
        return False
    return query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments,
    *,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Attend with query [sequence, batch, heads, channels] to key and value of groups; returns query's shape."""
    call = varlen_function()
    assert call is not None
    sequence, batch = query.shape[:2]
    heads, groups = query.shape[2], key.shape[2]
    known = inspect.signature(call).parameters
    asked, takes_groups = varlen_options(known, grouped=groups != heads, window=window)
    if groups != heads and not takes_groups:
        key, value = (part.repeat_interleave(heads // groups, dim=2) for part in (key, value))
    if scale is not None:
        asked["scale"] = scale
    # row behind row, as the bounds count
    flat = (part.transpose(0, 1).reshape(batch * sequence, part.shape[2], -1) for part in (query, key, value))
    bounds, longest = documents.bounds, documents.longest
    out = call(*flat, bounds, bounds, longest, longest, **asked)
    out = out[0] if isinstance(out, tuple) else out
    return out.view(batch, sequence, heads, -1).transpose(0, 1)  # type: ignore[no-any-return]
