"""From YAML files and overrides to one checked config of the class of its trainer.

In: a run config with its includes, the file of its cluster, variables of the shell, `--set`.
Out: a `RunConfig`, `MegatronConfig` or `CommandConfig` (`resolve.load_run_config`), its YAML for the run directory, and
a ConfigError that names file, line and the nearest valid name for every mistake.
`schema` holds the rules between sections; `sites` reads configs/clusters/; `campaign` reads sweeps and stages.
Nothing is imported here, because `writable` runs in Bash scripts before any schema is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayrun.config.compose.schema import RunConfig

__all__ = ["RunConfig"]


def __getattr__(name: str) -> Any:
    if name == "RunConfig":  # on demand: tokenization needs a section of its own, and the schema takes half a second
        from relayrun.config.compose.schema import RunConfig

        return RunConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
