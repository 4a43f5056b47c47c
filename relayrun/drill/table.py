"""The table of faults, which tests and `relayrun drill` go through."""

from __future__ import annotations

from relayrun.drill.fault import Fault
from relayrun.drill.job_faults import JOB_FAULTS
from relayrun.drill.program_faults import PROGRAM_FAULTS

FAULTS: tuple[Fault, ...] = (*PROGRAM_FAULTS, *JOB_FAULTS)
BY_NAME = {fault.name: fault for fault in FAULTS}
