"""What W&B and TensorBoard are told of a run, by processes of their own."""
