"""Shuffle a whole data set on disk before it is tokenized.

    reshard   the shuffle within a memory limit: plan, pass 1, pass 2
    buckets   long texts split into rows; rows scattered by their keys, and written in the order of the keys

In: files of a data set. Out: a folder of parquet files, the same bytes for the same seed.
"""
