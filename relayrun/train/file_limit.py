"""How many files a rank may have open: sockets to the other ranks are files, too.

Soft limits are often 1,024, whatever the node has; a process may raise its own up to the hard limit.
"""

from __future__ import annotations

import os
import resource

from relayrun.errors import RelayrunError


class OpenFileLimitTooLow(RelayrunError):
    """This node does not let a rank open as many files as there are ranks; another node may."""


def raise_file_limit(rank: int, ranks: int) -> None:
    """Raise the limit of this rank and its children to the hard one. Called before the ranks find each other.

    Raises TooFewFiles where that cannot do for so many ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = len(os.listdir("/proc/self/fd")) + sockets_of_rank(rank, ranks)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OpenFileLimitTooLow(
            f"rank {rank} of {ranks} opens {needed} files at least, sockets to the other ranks among them, and this "
            f"node allows {hard}",
            hint="raise the hard limit of open files (`ulimit -Hn`) on the nodes: LimitNOFILE of slurmd, "
            "or ulimits of the container",
        )


def sockets_of_rank(rank: int, ranks: int) -> int:
    """Return how many sockets a rank opens at least: one to every other rank, in the group over gloo.

    Rank 0 has the store, too, by which the ranks find each other, with one more to each of them.
    """
    return (ranks - 1) * (1 if rank else 2)
