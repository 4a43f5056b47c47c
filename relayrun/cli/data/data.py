"""`relayrun data show | ledger | diff | lengths`: what a run reads, and how long the documents of a folder are."""

from __future__ import annotations

import argparse
import re
import textwrap

from rich.console import Console
from rich.table import Table

from relayrun.cli.data import lengths
from relayrun.control.rundir.find_runs import find_run
from relayrun.errors import ConfigError
from relayrun.tokens.mixture import audit
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions

SHOWN_CHARACTERS = 300
"""Characters that are shown of each sample's text, unless --full is given."""


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun data`."""
    commands = parser.add_subparsers(dest="data_command", required=True)
    show = commands.add_parser("show", help="samples by number: data set, document, offset, text")
    show.add_argument("runs", nargs=1, metavar="RUN", help="a run directory, or PROJECT/NAME")
    show.add_argument("--samples", required=True, metavar="FIRST:END", help="for example 1000:1010; END is left out")
    show.add_argument("--full", action="store_true", help="all of the text, not its first 300 characters")
    ledger = commands.add_parser("ledger", help="how much of each data set was read, and when it is exhausted")
    ledger.add_argument("runs", nargs=1, metavar="RUN")
    diff = commands.add_parser("diff", help="what differs in the data of two runs; exit code 1 if anything does")
    diff.add_argument("runs", nargs=2, metavar="RUN")
    measure = commands.add_parser("lengths", help="how long documents are, and how they lie in their files")
    lengths.add_lengths_arguments(measure)
    for each in (show, ledger, diff):
        each.set_defaults(run=run_data)


def run_data(options: argparse.Namespace) -> int:
    """Do what `relayrun data ...` asks. Raises RelayrunError."""
    runs = [audit.audit_run(find_run(name)) for name in options.runs]
    if options.data_command == "show":
        print_samples(runs[0], sample_numbers(options.samples), full=options.full)
    elif options.data_command == "ledger":
        print_ledger(runs[0])
    else:
        found = audit.data_differences(*runs)
        print("\n".join(found) if found else "the data of both runs are the same")
        return 1 if found else 0
    return 0


def sample_numbers(text: str) -> range:
    """Return the samples that `1000:1010`, or one number, means. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None or (match[2] is not None and int(match[2]) <= int(match[1])):
        raise ConfigError(f"{text!r} is no range of samples", where="--samples", hint="write FIRST:END, as 1000:1010")
    first = int(match[1])
    return range(first, int(match[2]) if match[2] is not None else first + 1)


def print_samples(audited: audit.AuditedRun, wanted: range, *, full: bool) -> None:
    """Print a paragraph for each sample that is wanted."""
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=audited.config.data.tokenizer))
    for sample in audit.audited_samples(audited, wanted):
        step = "passed over" if sample.step is None else f"step {sample.step}"
        step += ", skipped" if sample.step in audited.progress.skipped else ""
        trained = "" if sample.number < audited.consumed_samples else ", not trained yet"
        print(f"sample {sample.number}: {sample.dataset}, epoch {sample.epoch}, number {sample.i}, {step}{trained}")
        for origin in sample.origins:
            print(f"  {origin.prefix}: document {origin.document}, offset {origin.offset}, {origin.tokens} tokens")
        text = tokenizer.tokenizer.decode(sample.tokens[:-1].tolist(), skip_special_tokens=False)
        print(textwrap.indent(text if full else text[:SHOWN_CHARACTERS], "  | "), flush=True)


def print_ledger(audited: audit.AuditedRun) -> None:
    """Print a table of how much of each data set a run has read."""
    rows = audit.dataset_ledgers(audited)
    table = Table(title=f"{audited.run.path.name}: {audited.consumed_samples:,} samples in {audited.iteration:,} steps")
    for name in (
        "data set",
        "weight",
        "samples",
        "not trained on",
        "epochs",
        "windows",
        "first epoch ends at sample",
        "at step",
    ):
        table.add_column(name, justify="left" if name == "data set" else "right")
    for row in rows:
        step = "passed over" if row.exhausted_step is None else f"{row.exhausted_step:,}"
        end = ("never", "never") if row.exhausted_sample is None else (f"{row.exhausted_sample:,}", step)
        if row.windows is None:
            end = ("not known", "")
        table.add_row(
            row.dataset,
            f"{row.weight:.4f}" if row.weight else "left",
            f"{row.samples:,}",
            f"{row.untrained:,}",
            "" if row.epochs is None else f"{row.epochs:.3f}",
            "stream" if row.windows is None else f"{row.windows:,}",
            *end,
        )
    table.add_row(
        "total", "", f"{sum(row.samples for row in rows):,}", f"{sum(row.untrained for row in rows):,}", "", "", "", ""
    )
    Console(width=120, highlight=False).print(table)
    for row in rows:
        if (read := row.lanes) is not None:
            low, high = read.epochs
            epochs = f"epoch {low}" if low == high else f"epochs {low} to {high}"
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in read.left_out.items())
            reasons = f" ({reasons})" if reasons else ""
            files = f"; left out whole: {read.files:,} files, counted in every epoch" if read.files else ""
            print(
                f"{row.dataset}: at sample {read.sample:,} its lanes stood in {epochs} (from 0), behind {read.rows:,} "
                f"rows, of which {sum(read.left_out.values()):,} were left out{reasons}{files}"
            )
