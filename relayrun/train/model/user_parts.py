"""Parts of the model that a user names: each token's loss (`training.loss`), and layers, a block or a whole model
(`model.spec`). `training.loss_mean` takes the mean of the losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from relayrun.errors import ConfigError
from relayrun.train.user_code import describe_error, import_user_code

if TYPE_CHECKING:
    pass


LOSS_ARGUMENTS = ("logits", "losses", "labels", "mask")


class UserLoss:
    """Calls a user's function with what it names of `logits`, `losses`, `labels` and `mask`."""

    def __init__(self, path: str) -> None:
        """Import it. Raises ConfigError in words if it is no function of these."""
        self._path = path
        self._function: Callable[..., torch.Tensor] = import_user_code(path)
        if not callable(self._function):
            raise ConfigError(f"{path} is no function")
        self._names = tuple(inspect.signature(self._function).parameters)
        if set(self._names) - set(LOSS_ARGUMENTS) or ("logits" in self._names) == ("losses" in self._names):
            raise ConfigError(
                f"{path} takes {', '.join(self._names) or 'nothing'}; a loss takes either logits or losses, and labels "
                "and mask, by these names"
            )

    @property
    def wants_logits(self) -> bool:
        """Whether the model gives logits, not losses."""
        return "logits" in self._names

    def __call__(self, output: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the losses of the tokens, [batch, sequence].

        `output`: of the model, logits [batch, sequence, vocabulary / tensor parallel size] or losses [batch, sequence].
        """
        if self.wants_logits:
            output = gather_from_tensor_model_parallel_region(output)
        known = {"logits": output, "losses": output, "labels": labels, "mask": mask}
        found = self._function(**{name: known[name] for name in self._names})
        if not isinstance(found, torch.Tensor) or found.shape != labels.shape:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"{self._path} returned {what}; a loss returns one of each token, {list(labels.shape)}",
                where="training.loss",
                hint="leave the mean to training.loss_mean",
            )
        return found


MODEL_METHODS = ("set_input_tensor", "sharded_state_dict")
"""What the pipeline and the checkpoint ask a model for."""


def build_user_model(
    path: str, transformer: TransformerConfig, **known: Any
) -> ModuleSpec | TransformerBlockSubmodules | torch.nn.Module:
    """Return what the function at `path` makes of the TransformerConfig, and of what it names of `known`.

    Raises ConfigError if it cannot be imported, raises something, or returns anything else.
    """
    function = import_user_code(path)
    try:
        names = inspect.signature(function).parameters
        found = function(transformer, **{name: value for name, value in known.items() if name in names})
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} failed: {describe_error(error)}", where="model.spec") from error
    if not isinstance(found, (ModuleSpec, TransformerBlockSubmodules, torch.nn.Module)):
        raise ConfigError(
            f"{path} returned {type(found).__name__}, which is no ModuleSpec, TransformerBlockSubmodules or module",
            where="model.spec",
        )
    if isinstance(found, torch.nn.Module) and (lacks := [name for name in MODEL_METHODS if not hasattr(found, name)]):
        raise ConfigError(
            f"{path} returned {type(found).__name__}, which has no {' and no '.join(lacks)}",
            where="model.spec",
            hint="return a model of megatron-core, such as GPTModel, or a class that inherits one",
        )
    return found
