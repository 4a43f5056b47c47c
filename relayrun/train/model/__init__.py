"""The model: megatron-core's GPTModel and the modules of its layers.

`gpt` builds this rank's pipeline stage and runs batches through it; the other modules are its parts. `size` counts
parameters, FLOPs and memory without torch; `cpu_patches` lets megatron-core run without CUDA. In: the sections `model`
and `parallel`, and micro-batches. Out: losses, and gradients in megatron-core's buffers. See `relayrun help models`.
"""
