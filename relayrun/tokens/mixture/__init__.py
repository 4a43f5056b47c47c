"""The mixture of a run: shards chosen by weight, its data sets built, changed at a submit, and audited.

In: folders of token shards with weights (`create_mixture`); a config and a manifest (`build_datasets`).
Out: a folder of links; the sampler that a rank reads; the account of samples and data sets of a run (`audit`).
This package stands above `order` and `streams` and is the only one that makes data sets.
docs/data-order.md explains it.
"""
