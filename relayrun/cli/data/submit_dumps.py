"""`relayrun dumps submit`, and launchers/submit_tokenization.py: every dump of a dataset as a job."""

from __future__ import annotations

import argparse

from relayrun.tokens.tokenize.dumps_jobs import submit_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config


def add_submit_dumps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("config", metavar="CONFIG", help="for example configs/data/tokenization-example.yaml")
    parser.add_argument("--executor", choices=("local", "slurm"), help="instead of the config's own")
    parser.add_argument("--wait", action="store_true", help="return when all Slurm jobs have ended")
    parser.set_defaults(run=run_submit_dumps)


def run_submit_dumps(options: argparse.Namespace) -> int:
    """Tokenize every dump of a dataset, as Slurm jobs or on this machine. Raises RelayrunError."""
    config = load_tokenization_config(options.config)
    if options.executor is not None:
        config = config.model_copy(update={"executor": options.executor})
    submit_dumps(config, wait=options.wait)
    return 0
