"""The flags of a checkout of Megatron-LM: from settings, from `args`, from a launcher's Bash arrays; their check."""
