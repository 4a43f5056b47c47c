"""The names of a model's parameters in the whole model, which do not depend on its layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state

_LAYERS = re.compile(r"(.*\blayers)\.\d+$")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc\d\.weight))(\d+)(.*)")


def parameter_names(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield this rank's parameters with their names.

    Layers are counted from 0 over all pipeline stages, experts over all ranks that a layer's are split over.
    """
    for chunk in chunks:
        layers, held = {}, 0
        for path, module in chunk.named_modules():
            held = max(held, getattr(module, "num_local_experts", 0))
            if (found := _LAYERS.match(path)) and hasattr(module, "layer_number"):
                layers[path] = f"{found[1]}.{module.layer_number - 1}"
        for path, parameter in chunk.named_parameters():
            name = path
            for layer, counted in layers.items():
                if path.startswith(f"{layer}."):
                    name = counted + path.removeprefix(layer)
            name = re.sub(r"^(module\.)+", "", name)
            if held and (found := _EXPERT.fullmatch(name)):
                number = int(found[2]) + held * parallel_state.get_expert_model_parallel_rank()
                name = f"{found[1]}{number}{found[3]}"
            copied = name == "output_layer.weight" and getattr(parameter, "shared", False)
            yield parameter, "embedding.word_embeddings.weight" if copied else name  # tied, on another stage
