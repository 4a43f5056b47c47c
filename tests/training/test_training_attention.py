"""The core attention on torch's SDPA: grouped queries share their keys and values without copies of them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

SEQUENCE, BATCH, HEADS, CHANNELS = 192, 2, 8, 16


def transformer_config(**fields: Any) -> Any:
    import warnings

    with warnings.catch_warnings():  # megatron-core's own, at import and of every config
        warnings.simplefilter("ignore")
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=4,
            hidden_size=HEADS * CHANNELS,
            num_attention_heads=HEADS,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            **fields,
        )


def causal_attention(layer: int = 1, **fields: Any) -> Any:
    config = transformer_config(**fields)
    from relayrun.train.model.attention import CausalAttention

    return CausalAttention(config, layer_number=layer)


@pytest.fixture(scope="module")
def attention() -> Any:
    return causal_attention()


def inputs(groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(groups)
    shapes = [(SEQUENCE, BATCH, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(attend: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attend(*parts)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out.double() * weights).sum(), parts)]


def by_formula(parts: list[torch.Tensor], visible: torch.Tensor) -> list[torch.Tensor]:
    """softmax(QK'/sqrt(d)) V in float64, each head with the key-value head of its group."""
    exact = [part.detach().double().requires_grad_() for part in parts]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = torch.arange(HEADS) // (HEADS // key.shape[2])
        scores = torch.einsum("sbhc,tbhc->bhst", query, key[:, :, group]) / CHANNELS**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhst,tbhc->sbhc", weights, value[:, :, group]).reshape(SEQUENCE, BATCH, -1)

    return with_gradients(attend, exact)


DOCUMENTS = ((50, 1, 141), (SEQUENCE,))
"""Lengths of the documents in each row."""


def in_documents(lengths: Any) -> tuple[Any, torch.Tensor]:
    """The documents as the attention takes them, and which tokens are of one: [batch, 1, sequence, sequence]."""
    from relayrun.train.model.packed_documents import PackedDocuments

    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    same = number[:, None, :, None] == number[:, None, None, :]
    return PackedDocuments(lengths=lengths, device=torch.device("cpu")), same


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_output_and_gradients_are_those_of_the_formula(
    attention: Any, groups: int, documents: Any, dtype: torch.dtype, tolerance: float
) -> None:
    """Within the rounding of the type; twice the same bits."""
    parts = inputs(groups, dtype)
    visible = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1)
    packed = None
    if documents is not None:
        packed, same = in_documents(documents)
        visible = visible & same
    attend = partial(attention, packed_seq_params=packed)
    found, again = (with_gradients(attend, parts) for _ in range(2))
    for ours, repeated, right in zip(found, again, by_formula(parts, visible), strict=True):
        assert torch.equal(ours, repeated)
        assert ((ours.double() - right).norm() / right.norm()).item() < tolerance


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [1, 5, 63, 130, SEQUENCE])
def test_with_a_window_a_token_sees_as_many_before_it(window: int, documents: Any) -> None:
    """In blocks of another length than the window, of the same, and of one that holds all."""
    near = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril().triu(-window).expand(BATCH, 1, -1, -1)
    packed = None
    if documents is not None:
        packed, same = in_documents(documents)
        near = near & same
    parts = inputs(2)
    attend = partial(causal_attention(window_size=(window, 0)), packed_seq_params=packed)
    for ours, right in zip(with_gradients(attend, parts), by_formula(parts, near), strict=True):
        assert ((ours.double() - right).norm() / right.norm()).item() < 2e-6


def test_a_window_is_that_of_megatron_cores_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own core attention, which keeps the whole matrix, as it is without a GPU."""
    from types import SimpleNamespace

    config = transformer_config(window_size=(20, 0), window_attn_skip_freq=[1, 0, 1, 0], num_query_groups=2)
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import GlobalMemoryBuffer

    from relayrun.train.model.attention import CausalAttention

    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **named: real(*shape, **named))  # device="cuda"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    config.sequence_parallel = True  # no state of generators, which dropout alone needs
    alone = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    outs = []
    for layer in (1, 2):
        theirs = DotProductAttention(config, layer, AttnMaskType.causal, "self", pg_collection=alone)
        parts = inputs(2)
        whole = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)  # its window has a mask of its own
        right = with_gradients(partial(theirs, attention_mask=whole), parts)
        found = with_gradients(CausalAttention(config, layer_number=layer), parts)
        assert (found[0] - right[0]).abs().max().item() < 5e-7
        for one, other in zip(found[1:], right[1:], strict=True):
            assert ((one - other).norm() / other.norm()).item() < 5e-7
        outs.append(found[0])
    assert (outs[0] - outs[1]).abs().max().item() > 0.1


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_keys_and_values_are_kept_for_the_backward_pass_once_a_group(attention: Any, groups: int) -> None:
    """Beside them the query, the output, and one sum for each head and token."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*inputs(groups))
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
        attention(*(part.detach().to("meta") for part in inputs(groups)))
    assert calls == [(2, 2, True) if usable else (HEADS, HEADS, False), (HEADS, HEADS, False)]


@pytest.mark.parametrize("documents", [DOCUMENTS, None])
@pytest.mark.parametrize("window", [None, 20])
def test_a_kernel_for_any_length_gets_all_documents_in_one_call(
    window: int | None, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: a stand-in with the arguments of torch's function, which attends to one document at a time."""
    from relayrun.train.model import attention as model_attention
    from relayrun.train.model.packed_documents import PackedDocuments

    calls = []

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert window_size == (-1 if window is None else window, 0)
        assert cu_seq_q is cu_seq_k
        assert max_q == max_k == SEQUENCE
        calls.append(cu_seq_q.tolist())
        outs = []
        for begin, end in pairwise(cu_seq_q.tolist()):
            one = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
            seen = torch.ones(end - begin, end - begin, dtype=torch.bool).tril().triu(-(window or SEQUENCE))
            out = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=enable_gqa)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    packed = None if documents is None else PackedDocuments(lengths=documents, device=torch.device("cpu"))
    fields = {} if window is None else {"window_size": (window, 0)}
    attend = partial(causal_attention(**fields), packed_seq_params=packed)
    right = with_gradients(attend, inputs(2))
    monkeypatch.setattr(model_attention, "varlen_usable", lambda _query, **_: True)
    monkeypatch.setattr(model_attention, "varlen_function", lambda: varlen_attn)
    found = with_gradients(attend, inputs(2))
    bounds = [0, 50, 51, SEQUENCE, 2 * SEQUENCE] if documents else [0, SEQUENCE, 2 * SEQUENCE]
    # rows without documents and without a window are torch's to choose a kernel for
    assert calls == ([] if documents is None and window is None else [bounds])
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_transformer_engine_gets_documents_in_its_own_format() -> None:
    """Without TransformerEngine: a stand-in for megatron-core's class around its attention."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from relayrun.train.model.packed_documents import PackedDocuments, document_attention

    class Stand:
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: AttnMaskType,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: PackedSeqParams | None = None,
        ) -> torch.Tensor:
            if packed_seq_params is None:
                assert attn_mask_type is AttnMaskType.causal
                return query.flatten(2)
            assert attn_mask_type is AttnMaskType.padding_causal
            assert packed_seq_params.qkv_format == "thd"
            assert packed_seq_params.cu_seqlens_q.tolist() == [0, 50, 51, SEQUENCE, 2 * SEQUENCE]
            assert packed_seq_params.max_seqlen_kv == SEQUENCE
            assert key.shape == value.shape == (BATCH * SEQUENCE, 2, CHANNELS)
            return query.flatten(1)

    attend = document_attention(Stand)()
    parts = inputs(2)
    packed = PackedDocuments(lengths=DOCUMENTS, device=torch.device("cpu"))
    for given in (None, packed):
        out = attend.forward(*parts, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=given)
        assert torch.equal(out, parts[0].flatten(2))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_of_context_parallel_ranks_are_reordered_as_by_an_index(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Bits forward and backward; no index, since a list of them is copied to the GPU while the host waits."""
    from megatron.core import parallel_state

    from relayrun.train.model import attention as module

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: size)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(module, "all_to_all", lambda _, part: part.contiguous())
    sequence, heads = 8 * size, 2 * size
    order = [part for rank in range(size) for part in (rank, 2 * size - 1 - rank)]
    generator = torch.Generator().manual_seed(size)

    def gathered(part: torch.Tensor) -> torch.Tensor:
        own = part.shape[0]
        by_rank = part.view(own, 2, size, heads // size, CHANNELS).permute(2, 0, 1, 3, 4).contiguous()
        pieces = by_rank.view(2 * size, own // 2, 2, heads // size, CHANNELS)
        return pieces[torch.tensor(order).argsort().tolist()].view(own * size, 2, heads // size, CHANNELS)

    def back(out: torch.Tensor) -> torch.Tensor:
        parts = out.reshape(2 * size, sequence // (2 * size), 2, heads // size, CHANNELS)[order]
        found = parts.reshape(size, sequence // size, 2, heads // size, CHANNELS)
        return found.permute(1, 2, 0, 3, 4).reshape(sequence // size, 2, heads, CHANNELS)

    part = torch.randn(sequence // size, 2, heads, CHANNELS, generator=generator, requires_grad=True)
    out = torch.randn(2, sequence, heads // size, CHANNELS, generator=generator, requires_grad=True)
    cases = [
        (lambda given: module.gather_sequence(given, given, given)[0], gathered, part),
        (
            lambda given: module.all_to_all_heads_to_sequence(given.transpose(0, 1)),
            lambda x: back(x.transpose(0, 1)),
            out,
        ),
    ]
    for new, old, given in cases:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = with_gradients(new, [given])
        for one, other in zip(found, with_gradients(old, [given]), strict=True):
            assert torch.equal(one, other)
        assert not [event.name for event in profile.events() if "index" in event.name]
