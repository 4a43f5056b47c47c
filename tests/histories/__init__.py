"""Histories of chains by seed: a Slurm in memory, a time that jumps, and laws that hold after each history.

`begin`, `watch`, `end`, the guard and the fallback job run unchanged, in process: `clock` gives them a time and stops
them wherever they wait, `controller` answers Slurm's commands, `nodes` runs batch scripts and ranks, `story` says what
goes wrong and what people do, `laws` says what must hold. `python -m tests.histories SEED` replays one history.
"""
