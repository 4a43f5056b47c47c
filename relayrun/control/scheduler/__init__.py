"""The batch system: Slurm, or a queue on this machine. Standard library only.

`base` has the class that a scheduler extends (eleven methods), `slurm` and `local` extend it, and `factory` alone
constructs them. No other package starts Slurm's commands. `tasks` starts the ranks of a local job. `job_history`
answers people. In: a plan and a job script. Out: job ids, states, nodes, and the command that starts the ranks.
"""
