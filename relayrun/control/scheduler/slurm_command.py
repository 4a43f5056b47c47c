"""One of Slurm's commands: started, waited for as long as it may take, and what its failure means."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from relayrun.control.scheduler.base import clean_environment
from relayrun.errors import SchedulerError


class NotInstalledError(SchedulerError):
    """Slurm's commands are not on this machine."""


class NoAnswerError(SchedulerError):
    """The command failed in a way that another try may mend: it says nothing about what was asked."""


class TimedOutError(NoAnswerError):
    """The command took longer than it may."""


class TooManyJobsError(SchedulerError):
    """So many jobs are there that Slurm takes no more now."""


COMMANDS_WITH_TIMES = ("sacct", "scontrol", "squeue")
"""Commands whose times a program reads; those of `sbatch --test-only` are for people."""
EPOCH_TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
"""Times are seconds since 1970: local ones come twice in the night in which summer time ends."""

_NO_ANSWER = re.compile(
    r"Unable to contact|Connection (refused|reset)|timed out|Zero Bytes|Transport endpoint|backup|authentication"
    r"|munge|temporarily|try again|Socket|No route|Unable to establish|Cannot allocate",
    re.I,
)
"""What an order that did not reach the controller, or whose answer was lost, is known to say."""

_TOO_MANY = re.compile(r"(Max|Grp)Submit")
"""What sbatch says where the number of jobs is the trouble, and not the job."""


def run_slurm_command(command: Sequence[str], lines: Sequence[str] = (), *, seconds: float, words: bool = False) -> str:
    """Run one command, for at most so many seconds; return what it printed.

    `lines`: orders for its standard input. `words`: return what it said on standard error, too. Raises
    NotInstalledError, TimedOutError, NoAnswerError, TooManyJobsError, or a plain SchedulerError where Slurm refused.
    """
    try:
        done = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            env=clean_environment(os.environ) | (EPOCH_TIME_FORMAT if command[0] in COMMANDS_WITH_TIMES else {}),
            check=False,
            timeout=seconds,
            errors="replace",
        )
    except FileNotFoundError:
        raise NotInstalledError(
            f"{command[0]} is not installed here",
            hint="submit from a login node of the cluster, or use `cluster: local`",
        ) from None
    except subprocess.TimeoutExpired:
        raise TimedOutError(f"{command[0]}: no answer within {seconds:.0f} s") from None
    except OSError as error:  # no memory or no process for the command
        raise NoAnswerError(f"{command[0]}: {error}") from None
    if done.returncode == 0 and not (lines and done.stderr):  # it says of the last order alone how it went
        return done.stdout + done.stderr if words else done.stdout
    message = done.stderr.strip() or f"exit code {done.returncode}"
    if done.returncode < 0 or _NO_ANSWER.search(message):
        raise NoAnswerError(f"{command[0]}: {message}")
    kind = TooManyJobsError if _TOO_MANY.search(message) else SchedulerError
    raise kind(f"{command[0]}: {message}")
