"""The order of samples: global sample k as a closed form over data sets, epochs and windows.

In: a manifest of token shards, the seed, a sample number. Out: a row of token ids, and batches for each rank.
`schedule` maps a sample number to data set and position, `sampler` keeps the state of a checkpoint, `datasets` has the
protocol that a user's own data set implements. `relayrun help data-order` explains it.
"""
