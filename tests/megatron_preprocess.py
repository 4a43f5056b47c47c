"""Runs `tools/preprocess_data.py` of a Megatron-LM checkout, unchanged, once for each tokenizer.

    cd CHECKOUT; PYTHONPATH=. python megatron_preprocess.py IN.jsonl OUT TOKENIZER...

Writes OUT/NAME_text_document.bin and .idx for a tokenizer of the folder NAME. What it imports for GPUs and pictures and
does not use here (triton, einops) may be missing: then those modules are empty.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types

KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
"""What imports triton."""


class Empty(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def main() -> None:
    source, out, *tokenizers = sys.argv[1:]
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = Empty("einops")
    if importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = Empty(KERNELS)
    for tokenizer in tokenizers:
        sys.argv = ["preprocess_data.py", "--input", source, "--output-prefix"]
        sys.argv += [os.path.join(out, os.path.basename(tokenizer)), "--append-eod", "--workers", "1"]
        sys.argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
        runpy.run_path("tools/preprocess_data.py", run_name="__main__")


if __name__ == "__main__":
    main()
