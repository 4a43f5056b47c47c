"""Composes YAML files and overrides into a checked config.

In: a run config with its includes, the file of its cluster, variables of the shell, `--set`. Out: a `RunConfig`,
`MegatronConfig` or `CommandConfig` (`resolve.load_run_config`), its YAML for the run directory, and a ConfigError that
names file, line and the nearest valid name for every mistake. `schema` holds the rules between sections; `sites` reads
configs/clusters/; `campaign` reads sweeps and stages; `megatron_flags` has the flag of
Megatron-LM for each setting. This file imports nothing: Bash scripts run `writable` without the schema.
"""
