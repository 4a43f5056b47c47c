"""Checkpoints in the torch_dist format: what is in one, how it is written, and when it counts."""
