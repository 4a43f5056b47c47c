"""The `relayrun` command: its verbs, in five groups.

run     submit, check, adopt, wrap, resume, launch, config, diff, explain, sweep, stages, save, stop, cancel
data    data, dumps, mixture
model   export, upload, import, checkpoint
watch   status, why, logs, report, goodput, runs, notify, sentinel
site    init, site, completion, gpu-check, drill

`COMMANDS` names for each verb its module. A call imports only the module of its verb.
Input: a command line. Output: text, JSON or files, and an exit code. Launchers and scripts call the same functions.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence

import relayrun
from relayrun.errors import run_command

AddArguments = Callable[[argparse.ArgumentParser], None]

COMMANDS = {
    "init": ("site.new_project", "a new project: launchers, configs and a site file in a folder of its own"),
    "submit": ("run.submit", "submit a training run"),
    "check": ("run.submit", "what a submit would refuse or warn of, and the plan of the run"),
    "adopt": ("run.adopt", "a run config from an existing launcher of Megatron-LM, line by line"),
    "wrap": ("run.wrap", "a batch script as it is becomes the program of a chain"),
    "resume": ("run.submit", "submit a run again as it was submitted last"),
    "launch": ("run.submit", "what the sbatch scripts of launchers/ call"),
    "config": ("run.settings", "the settings of a run config, or of a run, and where each value comes from"),
    "explain": ("run.settings", "what a setting means; without NAME: all settings"),
    "diff": ("run.settings", "what differs in the settings of two run configs or runs"),
    "data": ("data.inspect_data", "what a run reads: show samples, the ledger, the difference of two runs"),
    "dumps": ("data.dumps", "tokenization: a dataset as dumps, their jobs, where they stand, what suits this node"),
    "mixture": ("data.shards", "token shards as data sets of a run: mixed by weight, listed, checked"),
    "export": ("model.convert", "a checkpoint in the form that other programs read"),
    "upload": ("model.convert", "an exported folder to a repository of the Hugging Face hub"),
    "import": ("model.convert", "a checkpoint, to start a run from, of another program's model"),
    "checkpoint": ("model.checkpoint", "whether a checkpoint still holds its bytes; copies of it in a second place"),
    "gpu-check": ("site.lab", "what this machine's GPUs do with relayrun, in eight minutes"),
    "drill": ("site.lab", "faults on purpose, on your cluster: which ones a chain survives, and what each costs"),
    "site": ("site.lab", "probe: what a cluster does with jobs, by a job of two minutes; writes its site file"),
    "completion": ("site.completion", "a script that completes commands, options, runs and settings in a shell"),
    "status": ("watch.status", "where a run stands; without RUN: all runs"),
    "why": ("watch.why", "why an attempt ended: the first cause, how sure it is, and what to do next"),
    "sweep": ("run.sweeps_and_stages", "runs over axes of settings: submit, status, stop, resume"),
    "stages": (
        "run.sweeps_and_stages",
        "runs one behind the other, from checkpoint to checkpoint: submit, status, stop, resume",
    ),
    "sentinel": ("watch.cron_check", "one look after the runs of folders, for cron: tells what no job can tell"),
    "goodput": ("watch.report", "where the node hours of runs went: every second of every node in one named part"),
    "runs": ("watch.runs", "runs in folders: where they stand and how large they are; archive and move them"),
    "report": ("watch.report", "what runs did, as a page for a browser; --text: in the terminal; --png: as a picture"),
    "logs": ("watch.logs", "what the jobs of a run wrote; with -f also what they add"),
    "notify": ("watch.notify", "test whether those who are told of a run can be reached; send what was not sent"),
    "save": ("run.stop", "write a checkpoint and go on"),
    "stop": ("run.stop", "write a checkpoint and end the chain"),
    "cancel": ("run.stop", "end the chain at once; what was not saved is lost"),
}
"""By command: its module in this package, and its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `relayrun` command. Imports the module of the requested command alone."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _run(arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `run` is the function to call with them. Exits if they are wrong."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    if asked in COMMANDS and asked == arguments[0]:  # building all parsers takes ten times as long
        options, rest = _parser(asked, [asked]).parse_known_args(arguments)
        if not rest:
            return options
    return _parser(asked, COMMANDS).parse_args(arguments)


def _parser(asked: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of these commands; only the command `asked` gets its options."""
    parser = argparse.ArgumentParser(prog="relayrun", description="Language-model pretraining as a relay of Slurm jobs")
    parser.add_argument("--version", action="version", version=f"relayrun {relayrun.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in names:
        command = commands.add_parser(name, help=COMMANDS[name][1])
        if name == asked:
            adder(name)(command)
    return parser


def adder(name: str) -> AddArguments:
    """Return the function that adds the arguments of a command: `add_NAME_arguments`, or else `add_arguments`."""
    module = importlib.import_module(f"{__name__}.{COMMANDS[name][0]}")
    own: AddArguments | None = getattr(module, f"add_{name.replace('-', '_')}_arguments", None)
    return own or module.add_arguments


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help="run directory, or project/name below logs/runs")


def add_set_option(parser: argparse.ArgumentParser, words: str) -> None:
    """Add `--set NAME=VALUE`, whose values are collected in `overrides`."""
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE", help=words)


def as_program(add_arguments: AddArguments, description: str | None) -> int:
    """Run a subcommand as a program with the same flags, for scripts/ and launchers/."""

    def run() -> int:
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=form)
        add_arguments(parser)
        options = parser.parse_args()
        return int(options.run(options))

    return run_command(run)


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    return int(options.run(options))
