#!/usr/bin/env python3
"""Tokenize every dump of a dataset, as Slurm jobs or on this machine, from a YAML config."""

from __future__ import annotations

import argparse
import sys

from relayrun.errors import run_main
from relayrun.tokenization.dumps.jobs import submit_dumps
from relayrun.tokenization.settings import load_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="for example configs/data/tokenization-example.yaml")
    parser.add_argument("--executor", choices=("local", "slurm"), help="instead of the config's own")
    parser.add_argument("--wait", action="store_true", help="return when all Slurm jobs have ended")
    options = parser.parse_args()
    config = load_config(options.config)
    if options.executor is not None:
        config = config.model_copy(update={"executor": options.executor})
    submit_dumps(config, wait=options.wait)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
