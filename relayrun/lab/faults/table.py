"""The table of faults, which tests and `relayrun drill` go through."""

from __future__ import annotations

from relayrun.lab.faults.fault import Fault
from relayrun.lab.faults.job_faults import JOB_FAULTS
from relayrun.lab.faults.program_faults import PROGRAM_FAULTS

FAULTS: tuple[Fault, ...] = (*PROGRAM_FAULTS, *JOB_FAULTS)
FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
