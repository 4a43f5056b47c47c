"""The program that every rank executes: batches in, checkpoints out. Started as `python -m relayrun.train`.

`loop` runs one attempt on one rank. `model/` builds megatron-core's GPTModel, `optimizer/` its optimizers and the
learning rate, `checkpoint/` saves and loads the state, `reporting/` writes metrics, heartbeats and trackers.
`mirror/` copies checkpoints to a second destination; `export/` turns a checkpoint into other formats, and back. In: a
run directory with its config and data. Out: checkpoints, metrics.jsonl, outcome.json. See `relayrun help training`.
"""
