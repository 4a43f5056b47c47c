"""`model.spec`: layers, block or whole model by a user's function."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from relayrun.errors import ConfigError
from relayrun.train import own_code

MODEL_METHODS = ("set_input_tensor", "sharded_state_dict")
"""What the pipeline and the checkpoint ask a model for."""


def build_user_model(
    path: str, transformer: TransformerConfig, **known: Any
) -> ModuleSpec | TransformerBlockSubmodules | torch.nn.Module:
    """Return what the function at `path` makes of the TransformerConfig, and of what it names of `known`.

    Raises ConfigError if it cannot be imported, raises something, or returns anything else.
    """
    function = own_code.import_user_code(path)
    try:
        names = inspect.signature(function).parameters
        found = function(transformer, **{name: value for name, value in known.items() if name in names})
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} failed: {own_code.describe_error(error)}", where="model.spec") from error
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
