"""Token shards to batches: which shards there are, and which of them a mixture takes."""
