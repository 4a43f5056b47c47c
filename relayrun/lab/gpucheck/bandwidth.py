"""The part `bandwidth`: an all-reduce between all GPUs of this machine, and between all nodes of a job."""

from __future__ import annotations

from relayrun.files import read_json
from relayrun.lab.gpucheck.ranks import run_program
from relayrun.lab.gpucheck.setup import CheckSetup, PartFigures

BANDWIDTH_PROGRAM = "relayrun.lab.gpucheck.programs.bandwidth"
NODES_BANDWIDTH_FILE = "bandwidth-of-nodes.json"
"""What all ranks of the job measured together, before the check began; see `job.py`."""


def measure_bandwidth(setup: CheckSetup, figures: PartFigures) -> None:
    """Measure the bandwidth where there are several GPUs, or say that there are not."""
    nodes = setup.path / NODES_BANDWIDTH_FILE
    if nodes.exists():
        figures.add("nodes", read_json(nodes))
    elif setup.nodes > 1:
        figures.add("nodes", {"not_measured": f"the ranks of the {setup.nodes} nodes left nothing; see the job's log"})
    ranks = setup.ranks if setup.gpus else setup.sizes.cpu_ranks
    if ranks < 2:
        figures.add("machine", {"not_measured": "this machine has one GPU"})
    else:
        figures.add("machine", run_program(setup, BANDWIDTH_PROGRAM, ranks=ranks))
