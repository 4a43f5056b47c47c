"""Programs and hooks that run on the ranks of a check. They import torch, and write their figures as JSON."""
