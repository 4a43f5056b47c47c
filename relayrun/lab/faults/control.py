"""A test cluster (scripts/tools/test_cluster.sh), where the drill may end Slurm's own daemons."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from relayrun import places
from relayrun.errors import InputError, SchedulerError

TEST_CLUSTER_SCRIPT = "scripts/tools/test_cluster.sh"
CONTROL_SECONDS = 400
"""How long a start or a stop of a daemon may take."""


class ClusterControl(Protocol):
    """Rights over a cluster whose nodes all are this machine."""

    conf: Path
    """Its slurm.conf."""

    def kill_node(self, node: str) -> None:
        """SIGKILL of the node's slurmd; processes of its jobs go on."""

    def stop_ctld(self) -> None:
        """End the controller; running steps go on."""

    def start_ctld(self) -> None:
        """Start the controller with the queue that it had; returns when it answers."""

    def start_node(self, node: str) -> None:
        """Start the node's slurmd again; nothing where it runs."""


class TestClusterControl:
    """The test cluster in a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError where no test cluster is in the folder."""
        self._folder = folder.expanduser().resolve()
        self.conf = self._folder / "etc" / "slurm.conf"
        if not self.conf.is_file() or not (self._folder / "nodes").is_file():
            hint = "scripts/tools/test_cluster.sh up starts one; on a cluster of others leave --test-cluster out"
            raise InputError("no test cluster was started here", where=self._folder, hint=hint)

    def kill_node(self, node: str) -> None:
        self._script("kill-node", node)

    def stop_ctld(self) -> None:
        self._script("stop-ctld")

    def start_ctld(self) -> None:
        self._script("start-ctld")

    def start_node(self, node: str) -> None:
        self._script("start-node", node)

    def _script(self, verb: str, *arguments: str) -> None:
        command = [str(places.shared_file(TEST_CLUSTER_SCRIPT)), verb, str(self._folder), *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CONTROL_SECONDS, check=False
        )
        if done.returncode != 0:
            raise SchedulerError(f"{Path(TEST_CLUSTER_SCRIPT).name} {verb}: {done.stderr.strip()}", where=self._folder)
