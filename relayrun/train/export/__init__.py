"""A checkpoint to a model that people use: Hugging Face folders, megatron's plain format, and back; evaluation."""
