"""relayrun: language-model pretraining on Slurm as a relay of jobs that never loses work."""

__version__ = "0.1.0"
