"""From where on something of a node is worth a word: `chain.node_health_limits`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relayrun.config.sections.base import NonNegative, NonNegativeFloat, Section


class NodeHealthLimits(Section):
    """Limits of `chain.node_health`. What is beyond one is on record with both figures."""

    memory_gb: Literal["auto"] | NonNegativeFloat = "auto"
    """Free memory of a node, in 10^9 bytes; with less it is left out. `auto`: what the ranks of a node took in this run
    so far; with less than half of it a node is left out."""
    shm_gb: NonNegativeFloat = 0.05
    """Free room in /dev/shm, in 10^9 bytes."""
    tmp_gb: NonNegativeFloat = 0.5
    """Free room in the folder for temporary files (TMPDIR), in 10^9 bytes."""
    clock_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Seconds by which a node's clock may differ from the median of all."""
    open_files: NonNegative = 1024
    """Files that a process may open at least: the hard limit."""
    slower: Annotated[float, Field(gt=1)] = 1.5
    """How many times the run's median a matrix product, or an exchange with the neighbours, may take."""
    command_seconds: Annotated[float, Field(gt=0, le=40)] = 20.0
    """Seconds in which node_health_command must answer."""
