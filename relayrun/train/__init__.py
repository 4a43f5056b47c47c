"""The training program: batches in, checkpoints out. Started once per rank as `python -m relayrun.train`."""
