"""What feed-forward layers bend their values with, by the names of `model.transformer.activation_func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule


def squared_relu(values: torch.Tensor) -> torch.Tensor:
    """Return relu(x)²."""
    return functional.relu(values).square()


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """Return x · sigmoid(1.702 x), which is near to gelu."""
    return values * torch.sigmoid(1.702 * values)


def activation_inside_layer(values: torch.Tensor) -> torch.Tensor:
    """Stand for a function that each layer has a module for; megatron-core wants one in its config."""
    raise AssertionError("the layer has its own")


ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "xielu": activation_inside_layer,
}
"""Those of megatron-core that torch compiles on first use are written anew: on a CPU that takes longer than a run."""


class Xielu(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """The activation xIELU (arXiv 2411.13010) as Apertus has it: a parabola on the right, an exponential on the left.

    p x² + x/2 for x > 0, n (exp(min(x, -1e-6)) - 1 - x) + x/2 else; p = softplus(alpha_p), n = 1/2 + softplus(alpha_n).
    The two weights are numbers of the layer, equal on all tensor-parallel ranks.
    """

    _BETA = 0.5
    _BELOW_ZERO = -1e-6

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

        def weight(wanted: float) -> torch.nn.Parameter:
            """The weight whose softplus is `wanted`."""
            return torch.nn.Parameter(torch.tensor([wanted]).expm1().log().to(config.params_dtype))

        self.alpha_p, self.alpha_n = weight(0.8), weight(0.8 - self._BETA)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., width / tensor-parallel size] → the same shape."""
        # every rank has a part of the width: the weights' gradients are summed over the ranks
        positive, negative = map(copy_to_tensor_model_parallel_region, (self.alpha_p, self.alpha_n))
        right = functional.softplus(positive) * values * values
        left = (values.clamp(max=self._BELOW_ZERO).expm1() - values) * (self._BETA + functional.softplus(negative))
        return torch.where(values > 0, right, left) + self._BETA * values


class XieluMLP(MLP):  # type: ignore[misc]
    """A feed-forward layer of megatron-core with an `Xielu` of its own."""

    def __init__(self, config: TransformerConfig, *positional: Any, **named: Any) -> None:
        super().__init__(config, *positional, **named)
        self.activation_func = Xielu(config)
