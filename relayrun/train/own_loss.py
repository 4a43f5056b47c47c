"""`training.loss`: each token's loss by a user's function, before `training.loss_mean` takes the mean of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from relayrun.errors import ConfigError
from relayrun.train import own_code

LOSS_ARGUMENTS = ("logits", "losses", "labels", "mask")


class UserLoss:
    """Calls a user's function with what it names of `logits`, `losses`, `labels` and `mask`."""

    def __init__(self, path: str) -> None:
        """Import it. Raises ConfigError in words if it is no function of these."""
        self._path = path
        self._function: Callable[..., torch.Tensor] = own_code.import_user_code(path)
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
