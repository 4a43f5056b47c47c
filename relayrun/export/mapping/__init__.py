"""A model under megatron-core's names and under those of its class in transformers: one file of data for each class."""
