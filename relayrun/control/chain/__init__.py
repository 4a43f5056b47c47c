"""Jobs to a run: what a chain decides, how it talks to a scheduler, and the supervisor beside the ranks.

Standard library only: the supervisor may run on a bare host Python (3.11 or newer) while the training
environment lives in a container.
"""
