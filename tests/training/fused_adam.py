"""A stand-in for TransformerEngine's FusedAdam: its constructor, its states and their access, AdamW in plain torch.

With it the rest of the precision-aware optimizer is megatron-core's and relayrun's own: decoupled gradients, their norm
and clipping, and checkpoints. It says nothing about TransformerEngine's kernels.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW over weights in bf16, whose fp32 copies are part of its state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        *,
        adam_w_mode: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        master_weights: bool,
        use_decoupled_grad: bool,
        master_weight_dtype: torch.dtype,
        store_param_remainders: bool,
    ) -> None:
        assert not store_param_remainders
        assert adam_w_mode
        assert master_weights
        assert use_decoupled_grad
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self._dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, parameter: torch.Tensor) -> None:
        for name, dtype in self._dtypes.items():
            value = parameter.detach() if name == "master_param" else torch.zeros_like(parameter)
            self.state[parameter][name] = value.to(dtype, copy=True)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[parameter][name].float()

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == torch.float32
        self.state[parameter][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
            for parameter in group["params"] if state_dict["state"] else ():  # whose values come later
                if not self.state[parameter]:
                    self.initialize_state(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                state, gradient = self.state[parameter], parameter.decoupled_grad.float()
                mean = state["exp_avg"].float().lerp_(gradient, 1 - first)
                square = state["exp_avg_sq"].float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
                weight = state["master_param"].float().mul_(1 - lr * group["weight_decay"])
                root = (square.sqrt() / math.sqrt(1 - second ** group["step"])).add_(group["eps"])
                weight.addcdiv_(mean, root, value=-lr / (1 - first ** group["step"]))
                for name, value in (("exp_avg", mean), ("exp_avg_sq", square), ("master_param", weight)):
                    state[name].copy_(value)
                parameter.copy_(weight)


def install() -> None:
    """Let megatron-core and relayrun find it where TransformerEngine would be."""
    import megatron.core.optimizer as megatron
    from megatron.core.optimizer import distrib_optimizer

    import relayrun.train.model.gpt  # noqa: F401 - its layers have looked for TransformerEngine before
    from relayrun.train.optimizer import megatron_optimizer

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = importlib.util.spec_from_loader(name, loader=None)
    sys.modules["transformer_engine"].__version__ = "2.1.0"  # the first that could keep half a weight
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    megatron.Adam = distrib_optimizer.Adam = FusedAdam
    megatron.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = megatron_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
