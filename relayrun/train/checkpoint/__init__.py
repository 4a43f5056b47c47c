"""Checkpoints in the torch_dist format: what is in a checkpoint, how it is written, and when it counts.

`save_and_restore` decides when to save and what to load; `checkpointer` saves and loads the whole state;
`async_writer` and `reader` move the bytes, `checksums` verifies them, `publish` makes a checkpoint count.
`memory_tier` keeps copies in host memory. `checksums`, `megatron_folder`, `safe_pickle`, `host_buffers` need no torch.
In: the state of a rank. Out: `checkpoints/iter_N` and its commit. See docs/checkpoints.md.
"""
