"""Trainers: the programs that the ranks execute, and the observation of a program that writes no records.

In it: the protocol of a trainer (`base`), relayrun's own trainer, Megatron-LM's `pretrain_*.py`, a user's own command.
In: the trainer's section of `plan.json`, the logs and files of the program. Out: the command of a rank, its variables,
and the records of an attempt. Standard library only. `relayrun help command`, `relayrun help megatron-lm` and
`relayrun help recovery-of-other-trainers` explain it.
"""
