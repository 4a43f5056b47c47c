"""The core attention on torch's SDPA: grouped queries share their keys and values without copies of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

SEQUENCE, BATCH, HEADS, CHANNELS = 192, 2, 8, 16


@pytest.fixture(scope="module")
def attention() -> Any:
    import warnings

    with warnings.catch_warnings():  # megatron-core's own, at import and of every config
        warnings.simplefilter("ignore")
        from megatron.core.transformer import TransformerConfig

        from relayrun.training.model.attention import CausalAttention

        config = TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * CHANNELS,
            num_attention_heads=HEADS,
            use_cpu_initialization=True,
            attention_dropout=0.0,
        )
    return CausalAttention(config)


def inputs(groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(groups)
    shapes = [(SEQUENCE, BATCH, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(attention: Any, parts: list[torch.Tensor], visible: torch.Tensor | None) -> list[torch.Tensor]:
    out = attention(*parts, visible)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out.double() * weights).sum(), parts)]


def by_formula(parts: list[torch.Tensor], visible: torch.Tensor) -> list[torch.Tensor]:
    """softmax(QK'/sqrt(d)) V in float64, each head with the key-value head of its group."""
    exact = [part.detach().double().requires_grad_() for part in parts]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any) -> torch.Tensor:
        group = torch.arange(HEADS) // (HEADS // key.shape[2])
        scores = torch.einsum("sbhc,tbhc->bhst", query, key[:, :, group]) / CHANNELS**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhst,tbhc->sbhc", weights, value[:, :, group]).reshape(SEQUENCE, BATCH, -1)

    return with_gradients(attend, exact, None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_output_and_gradients_are_those_of_the_formula(
    attention: Any, groups: int, masked: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Within the rounding of the type; twice the same bits."""
    parts = inputs(groups, dtype)
    before = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    starts = torch.tensor([50, 120]).view(BATCH, 1, 1, 1)  # two documents in each sample
    at = torch.arange(SEQUENCE)
    visible = before & ((at[:, None] < starts) | (at >= starts)) if masked else before.expand(BATCH, 1, -1, -1)
    found, again = (with_gradients(attention, parts, visible if masked else None) for _ in range(2))
    for ours, repeated, right in zip(found, again, by_formula(parts, visible), strict=True):
        assert torch.equal(ours, repeated)
        assert ((ours.double() - right).norm() / right.norm()).item() < tolerance


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_keys_and_values_are_kept_for_the_backward_pass_once_a_group(attention: Any, groups: int) -> None:
    """Beside them the query, the output, and one sum for each head and token."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*inputs(groups), None)
    token = 4 * (2 * HEADS * CHANNELS + 2 * groups * CHANNELS + HEADS)
    assert sum(kept.values()) == SEQUENCE * BATCH * token


@pytest.mark.parametrize("usable", ["flash", "efficient", None])
def test_on_a_gpu_groups_are_shared_where_a_kernel_takes_them_and_spread_for_the_others(
    attention: Any, usable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: tensors without memory, and torch's answers about its kernels are put in its mouth."""
    for kernel in ("flash", "efficient"):
        monkeypatch.setattr(
            torch.backends.cuda,
            f"can_use_{kernel}_attention",
            lambda params, kernel=kernel: params.enable_gqa and kernel == usable,
        )
    calls = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for groups in (2, HEADS):
        attention(*(part.detach().to("meta") for part in inputs(groups)), None)
    assert calls == [(2, 2, True) if usable else (HEADS, HEADS, False), (HEADS, HEADS, False)]
