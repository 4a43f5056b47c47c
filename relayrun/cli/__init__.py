"""`relayrun`: the one command line; launchers and scripts are thin doors into the same functions."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import relayrun
from relayrun import ROOT
from relayrun.errors import run_main
from relayrun.rundir import triggers


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `relayrun` command."""
    parser = argparse.ArgumentParser(prog="relayrun", description=relayrun.__doc__)
    parser.add_argument("--version", action="version", version=f"relayrun {relayrun.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_submit(commands.add_parser("submit", help="submit a training run"))
    launch = commands.add_parser("launch", help="what the sbatch scripts of launchers/ call")
    launch.add_argument("config", type=Path)
    launch.add_argument("--dry-run", action="store_true", help="print the job script; write nothing")
    launch.set_defaults(run=run_launch)
    data = commands.add_parser("data", help="what a run reads: show samples, the ledger, the difference of two runs")
    add_data(data)
    add_dumps(commands.add_parser("dumps", help="tokenization: where the dumps stand, and what suits this node"))
    add_export(commands.add_parser("export", help="a checkpoint in the form that other programs read"))
    add_import(commands.add_parser("import", help="a checkpoint, to start a run from, of another program's model"))
    status = commands.add_parser("status", help="where a run stands; without RUN: all runs")
    status.add_argument("name", nargs="?", metavar="RUN", help="run directory, or project/name below logs/runs")
    status.add_argument("--json", action="store_true")
    status.set_defaults(run=run_status)
    for verb, what in (("save", "write a checkpoint and go on"), ("stop", "write a checkpoint and end the chain")):
        steer = commands.add_parser(verb, help=what)
        steer.add_argument("name", metavar="RUN", help="run directory, or project/name below logs/runs")
        steer.set_defaults(run=run_save if verb == "save" else run_stop)
    options = parser.parse_args(argv)
    return run_main(lambda: int(options.run(options)))


def add_submit(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun submit`, also those of launchers/submit.py."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a setting: --set training.steps=50",
    )
    parser.add_argument(
        "--load", metavar="RUN[:ITERATION]", help="begin with another run's checkpoint, or a checkpoint's folder"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job script; write and submit nothing")
    parser.add_argument("--resume", action="store_true", help="go on although the chain of this run has ended")
    parser.add_argument(
        "--accept-data-change",
        action="store_true",
        help="go on with data that are not those the run began with (docs/data-order.md)",
    )
    parser.set_defaults(run=run_submit)


def add_dumps(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun dumps`."""
    commands = parser.add_subparsers(dest="dumps_command", required=True)
    status = commands.add_parser("status", help="done, tokens, speed, what is left, failures")
    tune = commands.add_parser("tune", help="try workers and batches on the dataset's own files, on this node")
    for each in (status, tune):
        each.add_argument("folder", metavar="METADATA_FOLDER", help="as written by prepare_dumps.py")
    status.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="again and again, until all dumps are done, or the rest has failed: exit code 1",
    )
    tune.add_argument(
        "--tokenizer-name-or-path",
        required=True,
        metavar="T",
        help="a tokenizer.json, a folder that holds one, or a hub name",
    )
    tune.add_argument("--column", default="text", help="column of the text (default: %(default)s)")
    tune.add_argument("--engine", default="auto", help="as for preprocess_megatron.py (default: %(default)s)")
    tune.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers to try (default: 1, and a quarter, half and all of the cores)",
    )
    tune.add_argument(
        "--batch-bytes", type=int, nargs="+", metavar="N", help="bounds of a batch to try (default: 1, 4 and 16 MB)"
    )
    tune.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="that each pair is measured, start-up aside (default: %(default)s)",
    )
    tune.add_argument("--temp-dir", metavar="DIR", help="on the file system that the dumps go to (default: TMPDIR)")
    parser.set_defaults(run=run_dumps)


def run_dumps(options: argparse.Namespace) -> int:
    """Print where the dumps of a metadata folder stand, or which settings suit this node."""
    if options.dumps_command == "status":
        from relayrun.tokenization.dumps import status

        if options.watch is not None:
            return 0 if status.watch(options.folder, max(options.watch, 0.1)) else 1
        print(status.table(status.read_status(options.folder)))
        return 0
    from relayrun.tokenization.dumps import tune

    print(tune.row(None), flush=True)
    trials = tune.tune(
        options.folder,
        options=[
            "--tokenizer-name-or-path",
            options.tokenizer_name_or_path,
            "--column",
            options.column,
            "--engine",
            options.engine,
            "--append-eod",
            "auto",
        ],
        workers=options.workers or tune.default_workers(),
        batch_bytes=options.batch_bytes or tune.BATCH_BYTES,
        seconds=options.seconds,
        temp_dir=options.temp_dir,
        report=lambda trial: print(tune.row(trial), flush=True),
    )
    print(tune.advice(tune.recommended(trials)))
    return 0


def add_data(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun data`."""
    commands = parser.add_subparsers(dest="data_command", required=True)
    show = commands.add_parser("show", help="samples by number: data set, document, offset, text")
    show.add_argument("runs", nargs=1, metavar="RUN", help="a run directory, or PROJECT/NAME")
    show.add_argument("--samples", required=True, metavar="FIRST:END", help="for example 1000:1010; END is left out")
    show.add_argument("--full", action="store_true", help="all of the text, not its first 300 characters")
    ledger = commands.add_parser("ledger", help="how much of each data set was read, and when it is exhausted")
    ledger.add_argument("runs", nargs=1, metavar="RUN")
    diff = commands.add_parser("diff", help="what differs in the data of two runs; exit code 1 if anything does")
    diff.add_argument("runs", nargs=2, metavar="RUN")
    parser.set_defaults(run=run_data)


def run_data(options: argparse.Namespace) -> int:
    """Answer from run directories."""
    from relayrun.data import door

    return door.run(options)


def add_export(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun export`."""
    formats = parser.add_subparsers(dest="format", required=True)
    hf = formats.add_parser("hf", help="a folder for Hugging Face transformers")
    torch = formats.add_parser("torch", help="Megatron's plain torch format, tensor- and pipeline-parallel size 1")
    for command in (hf, torch):
        command.add_argument("name", metavar="RUN", help="run directory, or project/name below logs/runs")
        command.add_argument("--iteration", type=int, metavar="N", help="default: the newest whole checkpoint")
        command.add_argument("--output", type=Path, required=True, metavar="DIR", help="must not exist")
        command.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: that of the checkpoint's weights")
    hf.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file of weights (default: 5GB)")
    hf.add_argument("--test-logits", action="store_true", help="compare its logits with megatron-core's")
    hf.add_argument("--readme", action="store_true", help="write a model card from the run's records")
    torch.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose names the weights get",
    )
    parser.set_defaults(run=run_export)


def add_import(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun import`."""
    hf = parser.add_subparsers(dest="format", required=True).add_parser("hf", help="a Llama of Hugging Face")
    hf.add_argument("folder", type=Path, metavar="DIR", help="with config.json and *.safetensors")
    hf.add_argument("--output", type=Path, required=True, metavar="CKPT", help="must not exist")
    hf.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: that of the folder's weights")
    hf.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="as in the model section of the run that starts from it (default: 128)",
    )
    parser.set_defaults(run=run_import)


DTYPES = ("auto", "float32", "bfloat16", "float16")


def run_export(options: argparse.Namespace) -> int:
    """Write a checkpoint in another form."""
    from relayrun.export import door

    return door.export_hf(options) if options.format == "hf" else door.export_torch(options)


def run_import(options: argparse.Namespace) -> int:
    """Make a checkpoint of another form's model."""
    from relayrun.export import door

    return door.import_hf(options)


def run_submit(options: argparse.Namespace) -> int:
    """Submit, or print, one run."""
    from relayrun import settings, submission
    from relayrun.config import compose
    from relayrun.monitoring.follow import Follower
    from relayrun.scheduler import local

    load = [] if options.load is None else [f"checkpoint.load={settings.quoted(options.load)}"]
    config = compose.load(options.config, [*options.overrides, *load])
    if options.dry_run:
        print(submission.dry_run(config), end="")
        return 0
    submitted = submission.submit(config, resume=options.resume, accept_data_change=options.accept_data_change)
    print(
        f"job {submitted.job_id} ({submitted.plan.job_name})\nrun directory {submitted.run.path}\n"
        f"logs {submitted.plan.log_folder}",
        flush=True,
    )
    if submitted.plan.scheduler == "local":
        follower = Follower(submitted.run, total_steps=submitted.plan.total_steps)
        local.LocalScheduler(submitted.run).run_queue(local.print_event, follower.poll)
    return 0


def run_launch(options: argparse.Namespace) -> int:
    """Inside the first job of a Bash launcher: its settings are in the environment. Prints the run directory."""
    from relayrun import settings, submission
    from relayrun.config import compose

    config = compose.load(ROOT / options.config, settings.overrides(os.environ))
    if options.dry_run:
        print(submission.dry_run(config), end="")
        return 0
    print(
        submission.adopt_job(
            config,
            host_python=os.environ.get("HOST_PYTHON") or None,
            resume=settings.flag(os.environ, "RESUME"),
            accept_data_change=settings.flag(os.environ, "ACCEPT_DATA_CHANGE"),
        ).path
    )
    return 0


def run_status(options: argparse.Namespace) -> int:
    """Print where one run, or every run, stands."""
    from relayrun.monitoring import status, status_view
    from relayrun.rundir import find

    now = time.time()
    if options.name is not None:
        run = find.find_run(options.name)
        facts = status.gather(run, status.ask(run), now=now)
        if options.json:
            print(status_view.dump(status_view.as_json(facts)))
        else:
            status_view.show(status_view.one(facts, now=now))
        return 0
    found = status.gather_all(find.every_run(), now=now)
    if options.json:
        print(status_view.dump([status_view.as_json(entry) for entry in found]))
    elif found:
        status_view.show(status_view.many(found))
    else:
        print(f"no runs below {find.RUNS}")
    return 0


def run_save(options: argparse.Namespace) -> int:
    """Ask a run for a checkpoint."""
    from relayrun.chain import steer
    from relayrun.monitoring import status
    from relayrun.rundir import find

    run = find.find_run(options.name)
    print(steer.save(run, status.scheduler(run)))
    return 0


def run_stop(options: argparse.Namespace) -> int:
    """End a run's chain, after a checkpoint where a job runs."""
    from relayrun.chain import steer
    from relayrun.monitoring import status
    from relayrun.rundir import find

    run = find.find_run(options.name)
    print(steer.stop(run, status.scheduler(run), user=triggers.user_name(os.geteuid())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
