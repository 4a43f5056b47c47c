"""The mixture of a run: shards chosen by weight, its data sets built, changed at a submit, and audited.

In: folders of token shards with weights (`create_mixture`); a config and a manifest (`build_datasets`). Out: a folder
of links; the sampler that a rank reads; the account of samples and data sets of a run (`audit`). Only this package
makes data sets; it imports `order` and `streams`. `relayrun help data-order` explains it.
"""
