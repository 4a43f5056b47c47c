"""The batch system: Slurm, or a queue on this machine. Standard library only.

`base` has the class that a scheduler extends (eleven methods), `slurm` and `local` extend it, and `factory` alone
constructs them. A new batch system is a module here and an entry in `config.sections.batch_systems`. No other package
starts Slurm's commands. `local_srun` starts the ranks of a local job. `job_history` answers people, `error_lines` says
who failed. In: a plan and a job script. Out: job ids, states, nodes, and the command that starts the ranks.
"""
