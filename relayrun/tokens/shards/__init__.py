"""Megatron's token files: indexed shards, how they are written, listed, merged and verified."""
