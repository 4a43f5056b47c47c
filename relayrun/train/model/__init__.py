"""The model as megatron-core's GPTModel, and what its layers are made of."""
