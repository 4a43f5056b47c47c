"""Megatron's token files: a shard is PREFIX.bin and PREFIX.idx, with a record beside it.

    shard           one shard: open, write, and read its record
    prefixes        find the shards below folders (standard library only)
    manifest        the frozen list of shards that a run reads
    checks          shards against their records, and their tokenizer against the run's
    merge           several shards into one

In: token ids, prefixes and folders. Out: shards, manifests, and errors that name the shard.
"""
