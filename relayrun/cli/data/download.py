"""`relayrun dumps download`: files of a data set of the Hugging Face hub, with their checksums compared."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from relayrun.config.compose.writable import check_outputs


def add_download_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("repository", metavar="OWNER/NAME", help="a data set of the Hugging Face hub")
    parser.add_argument(
        "--include", required=True, nargs="+", metavar="PATTERN", help="paths of files in it, with * and ?"
    )
    parser.add_argument("--output-folder", required=True, type=Path, metavar="O", help="gets the files and SHA256SUMS")
    parser.add_argument("--revision", default="main", metavar="R", help="branch, tag or commit (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="files at a time (default: %(default)s)")
    parser.set_defaults(run=run_download)


def run_download(options: argparse.Namespace) -> int:
    """Fetch files and say where they are. Raises RelayrunError."""
    check_outputs({"--output-folder": options.output_folder})
    from relayrun.tokens.stores.download import (  # huggingface_hub, which takes a while to import
        CHECKSUMS_FILE,
        download_dataset,
    )

    count = download_dataset(
        options.repository,
        options.include,
        options.output_folder,
        revision=options.revision,
        at_once=options.workers,
        endpoint=os.environ.get("HF_ENDPOINT"),
        report=lambda line: print(line, flush=True),
    )
    print(f"{count:,} files in {options.output_folder}, their checksums in {CHECKSUMS_FILE}")
    return 0
