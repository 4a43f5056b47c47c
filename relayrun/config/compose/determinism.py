"""What `training.deterministic` needs in the environment of the ranks, as a table; without torch, for the submit.

The variables go into every job of the run, and the ranks look again before they start, since a container or a wrapper
may have changed them. `relayrun.train.distributed` turns on the rest.
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
"""The values with which each variable keeps results the same; the first one is set where there is none.

cuBLAS takes the same algorithm again only with workspaces of a fixed size. NCCL sums in a fixed order around a ring;
trees, and sums inside switches, follow what the network looks like. TransformerEngine then takes kernels of attention
that are deterministic in the backward pass.
"""


def deterministic_variables(config: RunConfig) -> dict[str, str]:
    """Return what every rank of this run needs in its environment; nothing without `training.deterministic`."""
    return {name: values[0] for name, values in DETERMINISTIC_VALUES.items()} if config.training.deterministic else {}


def check_deterministic_environment(environment: Mapping[str, str], *, where: str) -> None:
    """Raise ConfigError for the first variable whose value takes determinism away. Those that are not set are fine.

    `where`: whose environment it is, for the error.
    """
    for name, values in DETERMINISTIC_VALUES.items():
        value = environment.get(name)
        if value is not None and value.lower() not in [accepted.lower() for accepted in values]:
            raise ConfigError(
                f"{name}={value} makes results differ from run to run, and training.deterministic is on",
                where=where,
                hint=f"leave it out, set it to {' or '.join(values)}, or set training.deterministic=false",
            )
