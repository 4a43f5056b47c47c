"""Shuffle a whole data set on disk before it is tokenized.

    reshard        the shuffle within a memory limit: plan, pass 1, pass 2
    buckets        rows scattered by their keys, and written in the order of the keys
    text_lengths   the plot of lengths before and after, and the split of long texts

In: files of a data set. Out: a folder of parquet files, the same bytes for the same seed.
"""
