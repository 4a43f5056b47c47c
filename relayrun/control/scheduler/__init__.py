"""Slurm, or a queue on this machine: what a chain asks of either. Standard library only."""
