"""The names of a model's parameters in the whole model, which do not depend on its layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

_LAYERS = re.compile(r"(.*\blayers)\.\d+$")


def names(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield this rank's parameters with their names; layers are counted from 0 over all pipeline stages."""
    for chunk in chunks:
        layers = {}
        for path, module in chunk.named_modules():
            if (found := _LAYERS.match(path)) and hasattr(module, "layer_number"):
                layers[path] = f"{found[1]}.{module.layer_number - 1}"
        for path, parameter in chunk.named_parameters():
            name = path
            for layer, counted in layers.items():
                if path.startswith(f"{layer}."):
                    name = counted + path.removeprefix(layer)
            name = re.sub(r"^(module\.)+", "", name)
            copied = name == "output_layer.weight" and getattr(parameter, "shared", False)
            yield parameter, "embedding.word_embeddings.weight" if copied else name  # tied, on another stage
