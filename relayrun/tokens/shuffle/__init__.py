"""A global shuffle of a dataset on disk before it is tokenized, on one node or on several."""
