"""The `relayrun` command: its verbs, in five groups.

run     submit, check, forecast, adopt, wrap, resume, launch, config, diff, explain, sweep, stages, save, stop, cancel
data    data, dumps, mixture
model   export, import, checkpoint
watch   status, why, logs, report, goodput, metrics, runs, notify, sentinel
site    init, help, site, gpu-check, drill, trial

`COMMANDS` names for each verb its module. A call imports only the module of its verb.
Input: a command line. Output: text, JSON or files, and an exit code. Launchers and scripts call the same functions.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence

import relayrun
from relayrun.errors import begin_changes, did_you_mean, run_command

AddArguments = Callable[[argparse.ArgumentParser], None]

COMMANDS = {
    "init": ("site.help", "a new project: launchers, configs and a site file in a folder of its own"),
    "help": ("site.help", "search the pages and the settings, or show a page"),
    "submit": ("run.submit", "submit a training run"),
    "check": ("run.submit", "what a submit would refuse or warn of, and the plan of the run"),
    "forecast": ("run.forecast", "effective training time to expect of so many nodes that fail so often"),
    "adopt": ("run.settings", "a run config from an existing launcher of Megatron-LM, line by line"),
    "wrap": ("run.wrap", "run an existing sbatch script, unchanged, as a chain of jobs"),
    "resume": ("run.submit", "submit a run again as it was submitted last"),
    "launch": ("run.submit", "what the sbatch scripts of launchers/ call"),
    "config": ("run.settings", "the settings of a run config, or of a run, and where each value comes from"),
    "explain": ("run.settings", "what a setting means; without NAME: all settings"),
    "diff": ("run.settings", "what differs in the settings of two run configs or runs"),
    "data": ("data.inspect_data", "what a run reads: show samples, the ledger, the difference of two runs"),
    "dumps": ("data.dumps", "tokenization: a dataset as dumps, their jobs, where they stand, what suits this node"),
    "mixture": ("data.shards", "token shards as data sets of a run: mixed by weight, listed, checked"),
    "export": ("model.convert", "a checkpoint in the form that other programs read"),
    "import": ("model.convert", "a checkpoint, to start a run from, of another program's model"),
    "checkpoint": ("model.checkpoint", "verify the bytes of a checkpoint; copy it to a second place, and restore it"),
    "gpu-check": ("site.lab", "what this machine's GPUs do with relayrun, in five minutes"),
    "drill": ("site.lab", "faults on purpose, on your cluster: which ones a chain survives, and what each costs"),
    "trial": ("site.lab", "whether a program resumes and leaves when asked, in a short run that is killed on purpose"),
    "site": ("site.lab", "probe: what a cluster does with jobs, by a job of two minutes, added to its site file"),
    "status": ("watch.status", "where a run stands; without RUN: all runs"),
    "why": ("watch.logs", "why an attempt ended: the first cause, how sure it is, and what to do next"),
    "sweep": ("run.sweeps_and_stages", "runs over axes of settings: submit, status, stop, resume"),
    "stages": (
        "run.sweeps_and_stages",
        "runs one after the other, each from a checkpoint: submit, status, stop, resume",
    ),
    "sentinel": ("watch.cron_check", "a check from cron: tells of runs whose jobs are gone, held or stuck"),
    "goodput": ("watch.report", "where the node hours of runs went: every second of every node in one named part"),
    "metrics": ("watch.report", "metrics of runs for Prometheus: as text, as a file, or over HTTP on this machine"),
    "runs": ("watch.runs", "runs in folders: where they stand and how large they are; archive and move them"),
    "report": ("watch.report", "what runs did, as a page for a browser; --text: in the terminal"),
    "logs": ("watch.logs", "what the jobs of a run wrote; with -f also what they add"),
    "notify": ("watch.notify", "test whether those who are told of a run can be reached; send what was not sent"),
    "save": ("run.stop", "write a checkpoint and go on"),
    "stop": ("run.stop", "write a checkpoint and end the chain; a program that hears nothing runs to its time limit"),
    "cancel": ("run.stop", "end the chain at once; what was not saved is lost"),
}
"""By command: its module in this package, and its line of help."""
_READ_FIRST = {
    *("check", "forecast", "data", "mixture", "export", "import", "status", "logs", "report", "metrics"),
    *("checkpoint mirror", "checkpoint restore", "dumps example", "dumps tokenizer", "dumps shuffle", "dumps prepare"),
    "dumps merge",
}
"""Commands that change nothing, or only inside the blocks of `on_interrupt`, as those of `publishing` are."""

EXAMPLES = dict.fromkeys(COMMANDS, "my-project/my-run") | {
    "init": "my-project --cluster local",
    "help": "time limit",
    "submit": "configs/runs/my-run.yaml --set training.steps=40",
    "check": "configs/runs/my-run.yaml",
    "forecast": "--nodes 2048 --mtbf-hours 6300",
    "adopt": "submit-llama3-8b.sh",
    "wrap": "--checkpoints 'out/step-{iteration}.pt' train.sbatch --lr 1e-3",
    "resume": "my-project/my-run --set training.steps=280",
    "launch": "configs/runs/my-run.yaml",
    "config": "configs/runs/my-run.yaml",
    "explain": "training.steps",
    "diff": "my-project/my-run:1 my-project/my-run:2",
    "data": "show my-project/my-run --samples 0:4",
    "dumps": "submit configs/data/my-text.yaml",
    "mixture": "verify data/tokens/my-text",
    "export": "hf my-project/my-run --output models/my-run",
    "import": "hf models/llama --output checkpoints/llama",
    "checkpoint": "verify my-project/my-run",
    "gpu-check": "--tiny",
    "drill": "--cluster my-site --yes",
    "trial": "configs/runs/my-run.yaml",
    "site": "probe --cluster configs/clusters/my-site.yaml",
    "status": "my-project/my-run -f",
    "sweep": "submit configs/runs/my-sweep.yaml --dry-run",
    "stages": "submit configs/runs/my-stages.yaml --dry-run",
    "sentinel": "logs/runs",
    "runs": "list logs/runs",
    "report": "my-project/my-run --text",
    "logs": "my-project/my-run -f",
    "notify": "test configs/runs/my-run.yaml",
}
"""By command: an example of its arguments, the end of its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `relayrun` command. Imports the module of the requested command alone."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _run(arguments))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `run` is the function to call with them. Exits if they are wrong."""
    arguments = arguments or ["--help"]
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    if asked in COMMANDS and asked == arguments[0]:  # building all parsers takes ten times as long
        options, rest = _parser(asked, [asked]).parse_known_args(arguments)
        if not rest:
            return options
    parser = _parser(asked, COMMANDS)
    if arguments and asked == arguments[0] and asked not in COMMANDS:
        parser.error(
            f"there is no command {asked!r}; {did_you_mean(asked, COMMANDS, cutoff=0.65) or 'see `relayrun --help`'}"
        )
    return parser.parse_args(arguments)


def _parser(asked: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of these commands; only the command `asked` gets its options."""
    form = argparse.RawDescriptionHelpFormatter
    words = "Language-model pretraining as a relay of Slurm jobs"
    parser = argparse.ArgumentParser(prog="relayrun", description=words, epilog=_groups(), formatter_class=form)
    parser.add_argument("--version", action="version", version=f"relayrun {relayrun.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        example = f"example:\n  relayrun {name} {EXAMPLES[name]}"
        command = commands.add_parser(name, description=COMMANDS[name][1], epilog=example, formatter_class=form)
        if name == asked:
            adder(name)(command)
    return parser


def _groups() -> str:
    """Return the commands in their groups, a line each."""
    lines = []
    for group in ("run", "data", "model", "watch", "site"):
        own = [name for name in COMMANDS if COMMANDS[name][0].startswith(f"{group}.")]
        lines += [f"{group}:", *(f"  {name:<11} {COMMANDS[name][1]}" for name in own), ""] if own else []
    first = "`relayrun init FOLDER` makes a project and says what to call next."
    return "\n".join([*lines, first, "`relayrun help WORDS` searches the pages and the settings."])


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
        begin_changes()
        return int(options.run(options))

    return run_command(run)


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if _READ_FIRST.isdisjoint((arguments[0], " ".join(arguments[:2]))):
        begin_changes()
    return int(options.run(options))
