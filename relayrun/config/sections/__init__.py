"""The sections of a config, a file for each: setting, unit, default and the name that Megatron or Slurm uses.

In: nothing but `errors` and `slurmtime`. Out: section classes, and pure functions of their values.
Rules that compare two sections belong to `relayrun.config.compose.schema`.
"""
