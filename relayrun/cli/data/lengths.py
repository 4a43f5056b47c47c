"""`relayrun data lengths`: how long the documents of folders are, and how their lengths lie in the files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import ConfigError
from relayrun.tokens.tokenize.options import TokenizeOptions

if TYPE_CHECKING:
    from relayrun.tokens.order.length_order import LengthOrder
    from relayrun.tokens.order.lengths import LengthSummary


def add_lengths_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="of .bin/.idx shards, or of text: parquet, jsonl, arrow, csv; several, as before and after a shuffle",
    )
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
    """Print what the lengths of folders look like, and draw it. Raises RelayrunError."""
    # pyarrow and tokenizers: not paid for the other commands
    from relayrun.tokens.order.document_windows import DocumentCut
    from relayrun.tokens.order.length_order import measure_length_order
    from relayrun.tokens.order.length_picture import check_picture_name, draw_length_picture
    from relayrun.tokens.order.lengths import join_lengths, lengths_by_file, summarize_lengths

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
            records.append({"folder": folder, "unit": unit, **asdict(found), "order": order.record()})
        else:
            _print_lengths(folder if len(options.folders) > 1 else None, found, order, unit, options, room, len(files))
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    if options.picture is not None:
        draw_length_picture(orders, options.picture, unit=" or ".join(sorted(units)))
    return 0


def _print_lengths(
    title: str | None,
    found: LengthSummary,
    order: LengthOrder,
    unit: str,
    options: argparse.Namespace,
    room: int,
    files: int,
) -> None:
    if title is not None:
        print(f"{title}:")
    print(f"{found.documents:,} documents, {found.total:,} {unit}")
    print(
        f"min {found.shortest:,}, median {found.median:,.0f}, mean {found.mean:,.0f}, p99 {found.p99:,.0f}, "
        f"max {found.longest:,}"
    )
    print(
        f"{found.over:.1%} of the documents, with {found.in_long:.1%} of the {unit}, are longer than a window of "
        f"{options.window:,}"
    )
    spread = "" if found.packed_windows == found.windows else f"; padding is that of {found.packed_windows:,} of them"
    print(f"{found.windows:,} windows, overlap {options.overlap:,}{spread}")
    for packing, share in found.padding.items():
        print(f"padding of rows of {room:,}, {packing}: {share:.1%}")
    where = "1 file" if files == 1 else f"{files:,} files"
    if order.lag_1_correlation is not None:
        print(
            f"neighbours in {where}: lag-1 correlation {order.lag_1_correlation:.4f} (of a shuffle: within "
            f"{order.lag_1_noise:.4f} of 0)"
        )
    if order.batch_mean_variance_ratio is not None:
        print(
            f"batches of {order.batch} neighbours: variance of means / of independent draws "
            f"{order.batch_mean_variance_ratio:.2f} (of a shuffle: about 1)"
        )
