"""Slurm's commands as programs that answer from the environment and write down how they were called."""

from __future__ import annotations

import re
from pathlib import Path

from .masks import environment, write_text

COMMANDS = ("sbatch", "scontrol", "squeue", "sinfo", "scancel", "sacct", "srun")

PROGRAM = r"""#!/usr/bin/env bash
# one program under the names of all; RECORD_* are the answers
name="${0##*/}"
{ printf '%s' "${name}"; printf ' %q' "$@"; printf '\n'; } >>"${RECORD_CALLS}"
words=" $* "
nodes="${RECORD_NODES:-1}"
case "${name}${words}" in
  sbatch*--test-only*) echo "sbatch: Job 1 to start at 2026-11-26T00:00:00" >&2 ;;
  sbatch*)
    count="$(cat "${RECORD_CALLS}.jobs" 2>/dev/null || echo 100)"
    echo "$((count + 1))" | tee "${RECORD_CALLS}.jobs"
    ;;
  "scontrol  ") sed 's/^/  /' >>"${RECORD_CALLS}" ;; # orders on standard input
  "scontrol show hostnames "*) for ((n = 1; n <= nodes; n++)); do printf 'n%03d\n' "${n}"; done ;;
  "scontrol show config "*) printf 'KillWait = 30 sec\nMaxArraySize = 1001\n' ;;
  "scontrol show partition "*)
    echo "PartitionName=normal Default=YES MaxTime=1-00:00:00 MaxNodes=UNLIMITED State=UP TotalNodes=64"
    ;;
  "scontrol show job "*)
    job="${!#}" now="$(date +%s)" limit="${RECORD_LIMIT:-3600}" state=RUNNING
    [[ "${job}" == 100 ]] || state="${RECORD_STATE:-RUNNING}"
    echo "JobId=${job} JobName=${RECORD_NAME:-j} UserId=u(0) JobState=${state} Requeue=1 Partition=normal" \
      "TimeLimit=$((limit / 60)) SubmitTime=${now} EligibleTime=${now} StartTime=${now}" \
      "EndTime=$((now + limit)) NodeList=n[001-$(printf %03d "${nodes}")] BatchHost=n001 NumNodes=${nodes}" \
      "CPUs/Task=${RECORD_CPUS:-1} Command=/x WorkDir=/ StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power="
    ;;
  "scontrol show reservation "*) exit 1 ;;
  squeue*--format=%k*) echo "${RECORD_COMMENT:-}" ;;
  sinfo*--Node*) for ((n = 1; n <= nodes; n++)); do printf 'n%03d\n' "${n}"; done ;;
  sinfo*) echo idle ;;
esac
exit 0
"""

_OWN_WORD = re.compile(r"relayrun:[0-9a-f]{12}")


class SlurmCommands:
    """A folder with Slurm's commands, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COMMANDS:
            write_text(folder / "bin" / name, PROGRAM)
            (folder / "bin" / name).chmod(0o755)

    def calls(self) -> str:
        """Return the calls since this was asked last, one a line, without the word that is each job's own."""
        path = self.folder / "calls"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        path.unlink(missing_ok=True)
        return _OWN_WORD.sub("relayrun:WORD", text)

    def environment(self, *, inside: bool = False, **answers: str | int) -> dict[str, str]:
        """Return the environment of a program that finds these commands. `inside`: it is a part of job 100.

        `answers`: the name, nodes, cpus and limit (seconds) of that job.
        """
        found = environment()
        found |= {"PATH": f"{self.folder / 'bin'}:{found['PATH']}", "RECORD_CALLS": str(self.folder / "calls")}
        found |= {f"RECORD_{name.upper()}": str(value) for name, value in answers.items()}
        return found | ({"SLURM_JOB_ID": "100"} if inside else {})
