"""Token shards to batches: in which order a run reads them, what it has read, and what a mixture takes of them."""
