"""`relayrun data show | ledger | diff | overlap | lengths | why`: the samples that a run reads, and documents of text.

`show` prints samples. `ledger` prints how much of each data set a run has read. `diff` compares the data of two runs.
`overlap` prints how much of one data set of shards stands in another one. `lengths` prints and draws the document
lengths of folders of text. `why` prints which step dropped a document.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from relayrun.config.compose.writable import check_outputs
from relayrun.control.rundir.find_runs import find_run
from relayrun.errors import ConfigError
from relayrun.publishing import published_file
from relayrun.terminal import print_rows
from relayrun.tokens.mixture import audit
from relayrun.tokens.mixture.overlap import measure_overlap
from relayrun.tokens.readers.inputs import FORMATS
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.shard_folder import read_exclusions

if TYPE_CHECKING:
    from relayrun.tokens.order.document_lengths import LengthOrder, LengthSummary

SHOWN_CHARACTERS = 300
"""Characters printed of each sample's text without --full."""
LEDGER_COLUMNS = (
    "data set",
    "weight|n",
    "samples|n",
    "not trained on|n",
    "epochs|n",
    "windows|n",
    "first epoch ends at sample|n",
    "at step|n",
)


def add_lengths_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    kinds = f"of .bin/.idx shards, or of text: {', '.join(FORMATS)}; several, as before and after a shuffle"
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help=kinds)
    parser.add_argument("--window", type=int, default=8192, help="bos and eos included (default: %(default)s)")
    parser.add_argument("--overlap", type=int, default=0, help="that windows of one document share (default: 0)")
    parser.add_argument("--specials", type=int, choices=(0, 1, 2), default=0, help="bos and eos of a window: how many")
    parser.add_argument("--seq-length", type=int, metavar="N", help="of a row that is packed (default: the window)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="documents a batch (default: %(default)s)")
    parser.add_argument("--column", default=TokenizeOptions.default("column"), help="of the text (%(default)s)")
    parser.add_argument("--tokenizer", metavar="T", help="measure text in its tokens: encodes all (default: in bytes)")
    parser.add_argument("--json", action="store_true", help="print all figures, and a curve for each file")
    parser.add_argument("--picture", type=Path, metavar="P", help="gets length against position: .svg, .png or .pdf")
    parser.set_defaults(run=run_lengths)


def run_lengths(options: argparse.Namespace) -> int:
    """Print the document lengths of folders, and draw them. Raises RelayrunError."""
    # pyarrow and tokenizers: slow imports
    from relayrun.tokens.order.document_lengths import (
        check_picture_name,
        draw_length_picture,
        join_lengths,
        lengths_by_file,
        measure_length_order,
        summarize_lengths,
    )
    from relayrun.tokens.order.document_windows import DocumentCut

    room = options.seq_length or options.window
    specials = [0, 0][: options.specials] + [None] * (2 - options.specials)
    try:
        cut = DocumentCut(window=options.window, overlap=options.overlap, bos=specials[0], eos=specials[1])
    except ValueError as error:
        raise ConfigError(str(error), where="--overlap", hint="give a smaller overlap or a longer window") from None
    if room < options.window:
        raise ConfigError(
            f"a window of {options.window} does not fit a row of {room}", where="--seq-length", hint="make it longer"
        )
    if options.batch < 1:
        raise ConfigError(f"a batch has 1 document or more, not {options.batch}", where="--batch")
    if options.picture is not None:
        check_outputs({"--picture": options.picture})
        check_picture_name(options.picture)
    orders, records, units = {}, [], set()
    for folder in options.folders:
        files, unit = lengths_by_file(folder, column=options.column, tokenizer=options.tokenizer)
        found = summarize_lengths(join_lengths(lengths for _, lengths in files), cut, room)
        orders[folder] = order = measure_length_order(files, batch=options.batch)
        units.add(unit)
        if options.json:
            records.append({"folder": folder, "unit": unit, **asdict(found), "order": asdict(order)})
        else:
            if len(options.folders) > 1:
                print(f"{folder}:")
            _print_lengths(found, unit, options, room)
            _print_order(order, len(files))
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    if options.picture is not None:
        with published_file(options.picture) as picture:
            draw_length_picture(orders, picture, unit=" or ".join(sorted(units)))
        print(f"picture: {options.picture}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _print_lengths(found: LengthSummary, unit: str, options: argparse.Namespace, room: int) -> None:
    print(f"{found.documents:,} documents, {found.total:,} {unit}")
    middle = f"median {found.median:,.0f}, mean {found.mean:,.0f}, p99 {found.p99:,.0f}"
    print(f"min {found.shortest:,}, {middle}, max {found.longest:,}")
    long = f"{found.over:.1%} of the documents, with {found.in_long:.1%} of the {unit}"
    print(f"{long}, are longer than a window of {options.window:,}")
    spread = "" if found.packed_windows == found.windows else f"; padding is that of {found.packed_windows:,} of them"
    print(f"{found.windows:,} windows, overlap {options.overlap:,}{spread}")
    for packing, share in found.padding.items():
        print(f"padding of rows of {room:,}, {packing}: {share:.1%}")


def _print_order(order: LengthOrder, files: int) -> None:
    where = "1 file" if files == 1 else f"{files:,} files"
    if order.lag_1_correlation is not None:
        usual = f"(of a shuffle: within {order.lag_1_noise:.4f} of 0)"
        print(f"neighbours in {where}: lag-1 correlation {order.lag_1_correlation:.4f} {usual}")
    if order.batch_mean_variance_ratio is not None:
        ratio = f"{order.batch_mean_variance_ratio:.2f} (of a shuffle: about 1)"
        print(f"batches of {order.batch} neighbours: variance of means / of independent draws {ratio}")


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
    overlap = commands.add_parser("overlap", help="how many documents and n-grams of held-out shards are in others")
    overlap.add_argument("folders", nargs=2, type=Path, metavar="DIR", help="held-out shards, then training shards")
    most = "read about N tokens of each, evenly spread (default: %(default)s)"
    overlap.add_argument("--tokens", type=int, default=10_000_000, metavar="N", help=most)
    overlap.set_defaults(run=run_overlap)
    measure = commands.add_parser("lengths", help="how long documents are, and how they lie in their files")
    add_lengths_arguments(measure)
    why = commands.add_parser("why", help="which step dropped a document while it was tokenized, and why")
    why.add_argument("document", metavar="DOCUMENT_ID", help="its id, or FILE/ROW below the data set")
    why.add_argument("folder", metavar="DUMP", help="a dump's folder of shards, or its URL, or one above several")
    why.set_defaults(run=run_why_dropped)
    for each in (show, ledger, diff):
        each.set_defaults(run=run_data)


def run_data(options: argparse.Namespace) -> int:
    """Run `relayrun data show`, `ledger` or `diff`. Raises RelayrunError."""
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


def run_overlap(options: argparse.Namespace) -> int:
    """Print how much of one data set of shards stands in another one. Raises InputError."""
    held_out, training = (find_prefixes([folder]) for folder in options.folders)
    print(measure_overlap(held_out, training, most=max(options.tokens, 1)))
    return 0


def run_why_dropped(options: argparse.Namespace) -> int:
    """Print why steps dropped a document. Returns 1 if they did not drop it here."""
    seen = found = 0
    for shard, record in read_exclusions(options.folder):
        seen += 1
        if options.document in (record["id"], f"{record['file']}/{record['row']}"):
            found += 1
            scores = "".join(f", {name} {value}" for name, value in record["scores"].items())
            what = "cut" if record.get("cut") else "dropped"
            place = f"row {record['row']} of {record['file']}, shard {shard}"
            print(f"{record['id']}: {what} by {record['step']}: {record['reason']}{scores} ({place})")
    if not found:
        print(f"{options.document} is not among the {seen:,} dropped documents of {options.folder}")
    return 0 if found else 1


def sample_numbers(text: str) -> range:
    """Parse `1000:1010`, or one number. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None or (match[2] is not None and int(match[2]) <= int(match[1])):
        raise ConfigError(f"{text!r} is no range of samples", where="--samples", hint="write FIRST:END, as 1000:1010")
    first = int(match[1])
    return range(first, int(match[2]) if match[2] is not None else first + 1)


def print_samples(audited: audit.AuditedRun, wanted: range, *, full: bool) -> None:
    """Print a paragraph for each requested sample."""
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
    """Print a table of the samples that a run has read of each data set."""
    rows = audit.dataset_ledgers(audited)
    total = (f"{sum(row.samples for row in rows):,}", f"{sum(row.untrained for row in rows):,}")
    title = f"{audited.run.path.name}: {audited.consumed_samples:,} samples in {audited.iteration:,} steps"
    cells = [*map(_ledger_cells, rows), ("total", "", *total, "", "", "", "")]
    print_rows(LEDGER_COLUMNS, cells, title=title)
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


def _ledger_cells(row: audit.DatasetLedger) -> tuple[str, ...]:
    step = "passed over" if row.exhausted_step is None else f"{row.exhausted_step:,}"
    end = ("never", "never") if row.exhausted_sample is None else (f"{row.exhausted_sample:,}", step)
    return (
        row.dataset,
        f"{row.weight:.4f}" if row.weight else "left",
        f"{row.samples:,}",
        f"{row.untrained:,}",
        "" if row.epochs is None else f"{row.epochs:.3f}",
        "stream" if row.windows is None else f"{row.windows:,}",
        *(end if row.windows is not None else ("not known", "")),
    )
