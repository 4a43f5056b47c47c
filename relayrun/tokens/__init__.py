"""Tokens: from files of text to the batches that a rank trains on.

    stores/    files in a local folder or below a URL
    readers/   files of a data set as texts and rows of a bounded size
    shards/    Megatron's token files: written, listed, merged and checked
    curate/    duplicates and text of evaluations out of a data set, in stages of jobs
    tokenize/  raw text to shards, in dumps
    shuffle/   a global shuffle of a data set on disk
    order/     the samples of data sets in their order, for every rank
    streams/   text that ranks tokenize while training reads it
    mixture/   the mixture of a run: its data sets, changed at a submit, and audited

Siblings stand in the order of dependencies: stores is the lowest. See `relayrun help tokenization` and `relayrun help
data-order`.
"""
