"""From YAML files and overrides to one checked config of the class of its trainer.

In: a run config with its includes, the file of its cluster, variables of the shell, `--set`.
Out: a `RunConfig`, `MegatronConfig` or `CommandConfig` (`resolve.load_run_config`), its YAML for the run directory, and
a ConfigError that names file, line and the nearest valid name for every mistake.
`schema` holds the rules between sections; `sites` reads configs/clusters/; `campaign` reads sweeps and stages.
Nothing is imported here, because `writable` runs in Bash scripts before any schema is needed.
"""
