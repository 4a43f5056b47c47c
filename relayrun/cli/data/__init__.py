"""Commands for the data of runs: raw text to token shards, mixtures, and the samples that a run reads.

tokenize        dumps example, tokenizer, shuffle, tokenize
dumps           dumps prepare, submit, status, tune, verify, size
shards          mixture create, prefixes, verify; dumps merge
inspect_data    data show, ledger, diff, lengths
"""
