"""A checkpoint as a model that other programs read, and back; its evaluation.

`huggingface` and `megatron` write and read folders of these programs; `model_mapping` and `model_families` say which
tensors correspond. `torch_dist` reads and writes checkpoints without ranks, GPU and megatron-core. `evaluate` is a job
(`python -m relayrun.train.export.evaluate`). In: a checkpoint of a run, or a folder to import. Out: a folder that
appears whole or not at all. See `relayrun help export`.
"""
