"""Megatron-LM's own training programs (`pretrain_*.py` of a checkout) as a trainer. Standard library only."""
