"""One pass for a run directory; the supervisor of a job starts it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.control.rundir.run import Run
from relayrun.errors import run_main
from relayrun.train.mirror.sync import mirror_checkpoints


def main() -> int:
    """Make the pass; return the exit code, 1 after a complaint."""
    parser = argparse.ArgumentParser(prog="relayrun.train.mirror")
    parser.add_argument("run", type=Path)
    return mirror_checkpoints(Run(parser.parse_args().run)).tell()


if __name__ == "__main__":
    sys.exit(run_main(main))
