"""The `relayrun` command, one module a verb. Launchers and scripts call the same functions."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

import relayrun
from relayrun.errors import run_main

COMMANDS = {
    "init": ("init", "a new project: launchers, configs and a site file in a folder of its own"),
    "submit": ("submit", "submit a training run"),
    "check": ("check", "what a submit would refuse or warn of, and the plan of the run"),
    "resume": ("resume", "submit a run again as it was submitted last"),
    "launch": ("launch", "what the sbatch scripts of launchers/ call"),
    "config": ("config", "the settings of a run config, or of a run, and where each value comes from"),
    "explain": ("explain", "what a setting means; without NAME: all settings"),
    "diff": ("diff", "what differs in the settings of two run configs or runs"),
    "data": ("data", "what a run reads: show samples, the ledger, the difference of two runs"),
    "dumps": ("dumps", "tokenization: a dataset as dumps, their jobs, where they stand, what suits this node"),
    "mixture": ("mixture", "token shards as data sets of a run: mixed by weight, listed, checked"),
    "export": ("export", "a checkpoint in the form that other programs read"),
    "upload": ("upload", "an exported folder to a repository of the Hugging Face hub"),
    "import": ("import_checkpoint", "a checkpoint, to start a run from, of another program's model"),
    "checkpoint": (
        "checkpoint",
        "whether a checkpoint still holds its bytes; copies of it in a second place",
    ),
    "gpu-check": ("gpu_check", "what this machine's GPUs do with relayrun, in eight minutes"),
    "drill": ("drill", "faults on purpose, on your cluster: which ones a chain survives, and what each costs"),
    "completion": ("completion", "a script that completes commands, options, runs and settings in a shell"),
    "status": ("status", "where a run stands; without RUN: all runs"),
    "sweep": ("campaign", "runs over axes of settings: submit, status, stop, resume"),
    "stages": ("campaign", "runs one behind the other, from checkpoint to checkpoint: submit, status, stop, resume"),
    "sentinel": ("sentinel", "one look after the runs of folders, for cron: tells what no job can tell"),
    "goodput": ("goodput", "where the node hours of runs went: every second of every node in one named part"),
    "runs": ("runs", "runs in folders: where they stand and how large they are; archive and move them"),
    "report": (
        "report",
        "what runs did, as a page for a browser; --text: in the terminal; --png: as a picture",
    ),
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
    return run_main(lambda: _run(arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `run` is the function to call with them. Exits where they are wrong."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    if asked in COMMANDS and asked == arguments[0]:  # without the others, whose parsers take ten times as long
        options, rest = _parser(asked, [asked]).parse_known_args(arguments)
        if not rest:
            return options
    return _parser(asked, COMMANDS).parse_args(arguments)


def _parser(asked: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of these commands, which knows the options of the one that is `asked` for."""
    parser = argparse.ArgumentParser(prog="relayrun", description="Language-model pretraining as a relay of Slurm jobs")
    parser.add_argument("--version", action="version", version=f"relayrun {relayrun.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in names:
        module, words = COMMANDS[name]
        command = commands.add_parser(name, help=words)
        if name == asked:
            importlib.import_module(f"relayrun.cli.{module}").add_arguments(command)
    return parser


def as_program(command: ModuleType, description: str | None) -> int:
    """Run the module of a subcommand as a program of its own, with the same flags: what the scripts do."""

    def run() -> int:
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=form)
        command.add_arguments(parser)
        options = parser.parse_args()
        return int(options.run(options))

    return run_main(run)


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    return int(options.run(options))
