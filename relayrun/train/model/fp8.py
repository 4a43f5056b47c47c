"""Whether this rank's GPU and TransformerEngine can compute in 8 bits as `model.transformer.fp8_recipe` says."""

from __future__ import annotations

from typing import Any

from megatron.core import fp8_utils
from megatron.core.transformer import TransformerConfig

from relayrun.config.sections.transformer import TransformerSection
from relayrun.errors import FatalTrainingError

FP8_AVAILABLE = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""What TransformerEngine is asked whether the GPU can; older versions do not know every recipe."""


def check_fp8(settings: TransformerSection, transformer: TransformerConfig) -> None:
    """Ask before the model is built; megatron-core and TransformerEngine ask in the first step.

    Raises FatalTrainingError where the installed version does not know the recipe, or this GPU cannot compute by it.
    """
    manager: Any = getattr(fp8_utils, "FP8GlobalStateManager", None)
    if settings.fp8 is None or manager is None:  # without TransformerEngine `layers` says that it is missing
        return
    version = fp8_utils.get_te_version()
    try:
        fp8_utils.get_fp8_recipe(transformer)
    except (AssertionError, AttributeError, ValueError) as error:
        raise _fp8_refused(settings, f"TransformerEngine {version} does not know it ({error})") from error
    ask: Any = getattr(manager, FP8_AVAILABLE[settings.fp8_recipe], None)
    can, why = ask() if ask is not None else (False, f"TransformerEngine {version} does not know it")
    if not can:
        raise _fp8_refused(settings, why)


def _fp8_refused(settings: TransformerSection, why: str) -> FatalTrainingError:
    return FatalTrainingError(
        f"model.transformer.fp8 {settings.fp8} with fp8_recipe {settings.fp8_recipe} cannot be had here: {why}",
        hint="set another model.transformer.fp8_recipe, or leave out model.transformer.fp8",
    )
