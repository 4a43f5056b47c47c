"""Settings of training in 8 bits, a part of `model.transformer`; names as in megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import Literal

from relayrun.config.sections.base import NonNegative, Positive, Section

FP8_RECIPES_OF_FIELD: dict[str, tuple[str, ...]] = {
    "fp8_margin": ("delayed",),
    "fp8_amax_history_len": ("delayed",),
    "fp8_amax_compute_algo": ("delayed",),
    "fp8_wgrad": ("delayed",),
    "fp8_multi_head_attention": ("delayed",),
    "tp_only_amax_red": ("delayed",),
    "fp8_dot_product_attention": ("delayed", "tensorwise"),
    "first_last_layers_bf16": ("tensorwise", "mxfp8", "blockwise"),
}
"""The recipes that read a field, where not all do: with another one megatron-core would take no notice of it."""


class Fp8Fields(Section):
    """Matrix products in 8 bits, by TransformerEngine, which alone has them: training.transformer_impl says so."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Format of the numbers: e4m3 everywhere, or e5m2 for gradients (hybrid). None: products in training.precision."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "delayed"
    """What numbers share a scale, and when it is found. delayed: a tensor, from the steps before. tensorwise: a tensor,
    from its own numbers. blockwise: a block of a tensor. mxfp8: 32 numbers, on Blackwell GPUs."""
    fp8_margin: NonNegative = 0
    """Powers of two left free above the largest number."""
    fp8_amax_history_len: Positive = 1
    """Steps that a delayed scale looks back on."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Which of those steps' largest numbers makes the scale."""
    fp8_wgrad: bool = True
    """Compute the weights' gradients in 8 bits too; false needs fp8_recipe delayed."""
    fp8_dot_product_attention: bool = False
    """Attend in 8 bits too, with fp8_recipe delayed or tensorwise."""
    fp8_multi_head_attention: bool = False
    """Keep 8 bits between attention and the products around it, with fp8_dot_product_attention."""
    tp_only_amax_red: bool = False
    """Agree on delayed scales over tensor- and context-parallel ranks alone, not over replicas."""
    first_last_layers_bf16: bool = False
    """Leave the first and the last layers in bf16; with any recipe but delayed."""
    num_layers_at_start_in_bf16: NonNegative = 1
    """How many of the first, with first_last_layers_bf16; as many as a pipeline stage has at most."""
    num_layers_at_end_in_bf16: NonNegative = 1
    """How many of the last, with first_last_layers_bf16; as many as a pipeline stage has at most."""

    def check_recipe(self) -> None:
        """Raise ValueError for a field that the chosen recipe would not read, or that needs another one."""
        changed = {name for name, field in Fp8Fields.model_fields.items() if getattr(self, name) != field.default}
        for name, recipes in FP8_RECIPES_OF_FIELD.items():
            if name in changed and self.fp8_recipe not in recipes:
                raise ValueError(
                    f"{name} does not go with fp8_recipe {self.fp8_recipe}; set fp8_recipe to {' or '.join(recipes)}, "
                    f"or leave {name} out"
                )
        if self.fp8_multi_head_attention and not self.fp8_dot_product_attention:
            raise ValueError("fp8_multi_head_attention needs fp8_dot_product_attention: true")
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if name in changed and not self.first_last_layers_bf16:
                raise ValueError(f"{name} needs first_last_layers_bf16: true")
