"""Runs a script that asks `relayrun.client`, with steps that take longer, and stops where a test wants it to.

    python tests/paced.py --seconds=0.1 --save-at=5 --hold-at=15 -- SCRIPT ARGUMENT ...

So an example may be cut and killed at a known place, and stays as it is.
"""

import argparse
import os
import runpy
import sys
import time
from itertools import count
from pathlib import Path

from relayrun import client

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0.0, help="that each step takes longer")
parser.add_argument("--save-at", type=int, default=0, help="at this step somebody asks for a checkpoint")
parser.add_argument("--hold-at", type=int, default=0, help="at this step of a run's first attempt it stands still")
parser.add_argument("--held", type=Path, help="is made when it stands still")
parser.add_argument("words", nargs="+")
options = parser.parse_args()
leaves, saves = count(1), count(1)
should_leave, should_save = client.should_leave, client.should_save


def paced_leave() -> bool:
    time.sleep(options.seconds)
    if next(leaves) == options.hold_at and client.checkpoint() is None:
        if os.environ["RANK"] == "0":
            options.held.touch()
        time.sleep(10_000)
    return should_leave()


def paced_save() -> bool:
    asked = next(saves) == options.save_at and os.environ["RANK"] == "0"
    return should_save() or asked


client.should_leave, client.should_save = paced_leave, paced_save
sys.argv = options.words
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
