"""Checkpoints in the torch_dist format: their contents, how they are written, and when they count.

`save_and_restore` decides when to save and which state to load; `checkpointer` saves and loads the whole state;
`async_writer` and `reader` move the bytes, `checksums` verifies them, `publish` makes a checkpoint count. `memory_tier`
keeps copies in node memory. `checksums`, `compatibility`, `megatron_folder`, `host_buffers` need no torch. In: the
state of a rank. Out: `checkpoints/iter_N` and its commit. See `relayrun help checkpoints`.
"""
