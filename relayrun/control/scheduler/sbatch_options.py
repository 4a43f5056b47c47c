"""Which options sbatch has: the installed one's own list, so that a site's plugins count, or a list kept here."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable

from relayrun.control.scheduler import slurm_command
from relayrun.errors import ConfigError, SchedulerError

KNOWN_SBATCH_VERSION = "22.05.8"
"""The Slurm whose options stand in KNOWN."""

_SBATCH_OPTIONS = """
    account array bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
    gpus-per-task gres gres-flags help hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes
    ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe
    parsable partition power priority profile propagate qos quiet reboot requeue reservation signal sockets-per-node
    spread-job switches test-only thread-spec threads-per-core time time-min tmp uid usage use-min-nodes verbose version
    wait wait-all-nodes wckey wrap
"""

KNOWN_SBATCH_OPTIONS = frozenset(_SBATCH_OPTIONS.split())

_SBATCH_HELP_SECONDS = 20.0


def option_names_in(text: str) -> frozenset[str]:
    """Long names of options in what `sbatch --help` or `sbatch --usage` prints."""
    return frozenset(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text))


@functools.cache
def installed_sbatch_options() -> frozenset[str] | None:
    """The options of the sbatch that is installed here; None where there is none, or it prints no list."""
    try:
        texts = [
            slurm_command.run_slurm_command(["sbatch", option], seconds=_SBATCH_HELP_SECONDS)
            for option in ("--help", "--usage")
        ]
    except SchedulerError:  # not installed, or without the file that names its cluster
        return None
    names = option_names_in("\n".join(texts))
    return names | _UNLISTED_SBATCH_OPTIONS if "job-name" in names else None


_UNLISTED_SBATCH_OPTIONS = frozenset(
    {"kill-on-invalid-dep", "mem-bind", "network", "ntasks-per-gpu", "open-mode", "wait-all-nodes"}
)
"""Options that every sbatch takes and not every one lists."""


def check_sbatch_options(names: Iterable[str], *, where: str) -> None:
    """Raise ConfigError, with the nearest name, for the first that sbatch does not have. `where`: the setting."""
    names = list(names)
    if not names:
        return
    known, whose = installed_sbatch_options(), "the sbatch that is installed here"
    if known is None:
        known, whose = KNOWN_SBATCH_OPTIONS, f"sbatch {KNOWN_SBATCH_VERSION}"
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ConfigError(
                f"{whose} has no option --{name}",
                where=f"{where}.{name}",
                hint=f"did you mean {near[0]}?" if near else "`sbatch --help` lists them",
            )
