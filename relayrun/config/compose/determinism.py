"""Environment variables that `training.deterministic` needs; imported without torch by the submit.

Every job of the run gets the variables. Ranks check them before they start, since a container or a wrapper may change
them. `relayrun.train.distributed` turns on the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError

DETERMINISTIC_VALUES: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Accepted values of each variable; the first is the default.

cuBLAS repeats its choice of algorithm only with workspaces of a fixed size. NCCL sums in a fixed order around a ring;
trees, and sums inside switches, depend on the network. TransformerEngine uses attention kernels with a deterministic
backward pass.
"""


def deterministic_variables(config: RunConfig) -> dict[str, str]:
    """Return the variables of every rank; empty without `training.deterministic`."""
    return {name: values[0] for name, values in DETERMINISTIC_VALUES.items()} if config.training.deterministic else {}


def check_deterministic_environment(environment: Mapping[str, str], *, where: str) -> None:
    """Raise ConfigError for the first variable with a value that breaks determinism. Unset variables are accepted.
    `where` names the environment in the error."""
    for name, values in DETERMINISTIC_VALUES.items():
        value = environment.get(name)
        if value is not None and value.lower() not in [accepted.lower() for accepted in values]:
            words = f"{name}={value} makes results differ from run to run, and training.deterministic is on"
            hint = f"leave it out, set it to {' or '.join(values)}, or set training.deterministic=false"
            raise ConfigError(words, where=where, hint=hint)
