"""xIELU, against its formula in float64 and against transformers' layer."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def activations() -> Any:
    with warnings.catch_warnings():  # megatron-core's own, at import
        warnings.simplefilter("ignore")
        from relayrun.train.model import layers

    return layers


@pytest.fixture
def xielu(activations: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The layer on one rank, its weights changed from the fresh ones."""
    monkeypatch.setattr(activations, "copy_to_tensor_model_parallel_region", lambda parameter: parameter)
    made = activations.Xielu(SimpleNamespace(params_dtype=torch.float32))
    with torch.no_grad():
        made.alpha_p += 0.3
        made.alpha_n -= 0.2
    return made


VALUES = [*torch.linspace(-30, 30, 601).tolist(), -1e-6, -5e-7, 0.0, 5e-7]


def test_fresh_weights_are_those_of_the_paper(activations: Any) -> None:
    """Both slopes are 0.8, of which beta, 0.5, is not learnt on the left."""
    fresh = activations.Xielu(SimpleNamespace(params_dtype=torch.float64))
    softplus = torch.nn.functional.softplus
    assert softplus(fresh.alpha_p).item() == pytest.approx(0.8, rel=1e-6)
    assert 0.5 + softplus(fresh.alpha_n).item() == pytest.approx(0.8, rel=1e-6)
    assert [parameter.shape for parameter in fresh.parameters()] == [(1,), (1,)]


def test_values_and_gradients_are_those_of_the_formula(xielu: Any) -> None:
    import numpy as np

    found = torch.tensor(VALUES, requires_grad=True)
    out = xielu(found)
    x = np.asarray(VALUES, dtype=np.float32).astype(np.float64)
    p, n = (np.log1p(np.exp(weight.item())) for weight in (xielu.alpha_p, xielu.alpha_n))
    left = (0.5 + n) * (np.expm1(np.minimum(x, -1e-6)) - x) + 0.5 * x
    right = np.where(x > 0, p * x * x + 0.5 * x, left)
    assert np.abs(out.detach().double().numpy() - right).max() < 1e-6 * np.abs(right).max()
    (slope,) = torch.autograd.grad(out.sum(), found)
    slopes = np.where(x > 0, 2 * p * x + 0.5, (0.5 + n) * (np.where(x < -1e-6, np.exp(x), 0) - 1) + 0.5)
    assert np.abs(slope.double().numpy() - slopes)[np.abs(x + 1e-6) > 1e-9].max() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_transformers(xielu: Any, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers.activations")
    theirs, ours = transformers.XIELUActivation(dtype=dtype), xielu.to(dtype)
    with torch.no_grad():
        theirs.alpha_p.copy_(ours.alpha_p)
        theirs.alpha_n.copy_(ours.alpha_n)
    values = torch.tensor(VALUES, dtype=dtype)
    assert torch.equal(ours(values), theirs._xielu_python(values))
