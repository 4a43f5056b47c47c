"""The `relayrun` command, one module a verb. Launchers and scripts call the same functions."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import relayrun
from relayrun.errors import run_main

COMMANDS = {
    "submit": ("submit", "submit a training run"),
    "resume": ("resume", "submit a run again as it was submitted last"),
    "launch": ("launch", "what the sbatch scripts of launchers/ call"),
    "config": ("config", "the settings of a run config, or of a run, and where each value comes from"),
    "explain": ("explain", "what a setting means; without NAME: all settings"),
    "diff": ("diff", "what differs in the settings of two run configs or runs"),
    "data": ("data", "what a run reads: show samples, the ledger, the difference of two runs"),
    "dumps": ("dumps", "tokenization: where the dumps stand, and what suits this node"),
    "export": ("export", "a checkpoint in the form that other programs read"),
    "import": ("import_checkpoint", "a checkpoint, to start a run from, of another program's model"),
    "checkpoint": ("checkpoint", "whether a checkpoint still holds the bytes that were saved"),
    "gpu-check": ("gpu_check", "what this machine's GPUs do with relayrun, in eight minutes"),
    "status": ("status", "where a run stands; without RUN: all runs"),
    "logs": ("logs", "what the jobs of a run wrote; with -f also what they add"),
    "notify": ("notify", "test whether those who are told of a run can be reached; send what was not sent"),
    "save": ("control", "write a checkpoint and go on"),
    "stop": ("control", "write a checkpoint and end the chain"),
    "cancel": ("control", "end the chain at once; what was not saved is lost"),
}
"""Every command with its module in this package and its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `relayrun` command. Only the module of the command that is asked for is imported."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="relayrun", description="Language-model pretraining as a relay of Slurm jobs")
    parser.add_argument("--version", action="version", version=f"relayrun {relayrun.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words)
        if name == asked:
            importlib.import_module(f"relayrun.cli.{module}").add_arguments(command)
    options = parser.parse_args(arguments)
    return run_main(lambda: int(options.run(options)))
