"""Code of the user that a config names by import path: its import, the loss and the model.

All ranks import it, or all refuse it. `training.loss` names a function that returns the loss of each token, whose mean
`training.loss_mean` takes. `model.spec` names layers, a block or a whole model.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relayrun.errors import ConfigError

if TYPE_CHECKING:
    from relayrun.train.distributed import Ranks

T = TypeVar("T")


def import_user_code(path: str) -> Any:
    """Return the object at `module:name`. Raises ConfigError if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be imported: {describe_error(error)}") from error


def agree_on_user_code(make: Callable[[], T], ranks: Ranks, *, setting: str, hint: str) -> T:
    """Return the result of `make` on this rank; all ranks call it together.

    If `make` raises ConfigError on any rank, ConfigError is raised on all ranks and names the setting.
    """
    made, problem = None, None
    try:
        made = make()
    except ConfigError as error:
        problem = error.message
    for rank, text in enumerate(ranks.gather(problem)):
        if text is not None:
            raise ConfigError(text if rank == 0 else f"{text} (rank {rank})", where=setting, hint=hint)
    return made  # type: ignore[return-value]  # what raised nothing has made it


def describe_error(error: BaseException) -> str:
    """Return type, message, and the line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


LOSS_ARGUMENTS = ("logits", "losses", "labels", "mask")


class UserLoss:
    """Calls a user's loss with the arguments that it names: `logits` or `losses`, `labels`, `mask`."""

    def __init__(self, path: str) -> None:
        """Import the function. Raises ConfigError if its arguments do not fit."""
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
        """True if the function takes logits instead of losses."""
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
"""Methods that pipeline and checkpoint call on a model."""


def build_user_model(
    path: str, transformer: TransformerConfig, **known: Any
) -> ModuleSpec | TransformerBlockSubmodules | torch.nn.Module:
    """Call the function at `path` with the TransformerConfig and the values of `known` that it names; return its
    result.

    Raises ConfigError if the function cannot be imported, raises an error, or returns another type.
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
