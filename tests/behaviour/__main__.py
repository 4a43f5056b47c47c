"""The recorder's command line."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .differences import differences

PARTS = ("plans", "ends", "training", "tokens", "commands", "users", "strings", "wheel", "counts")
"""Modules of this package with a function `record`, and folders of a record."""


def main(argv: Sequence[str] | None = None) -> int:
    """Record, compare, or plant faults; return the exit status."""
    options = _parser().parse_args(argv)
    if options.command == "faults":
        from .plant import main as plant_faults

        return plant_faults(options.only, list_alone=options.list)
    if options.command == "record":
        record(options.out, options.parts)
        return 0
    if options.now is not None:
        return _tell(options.against, options.now, options.parts)
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        record(Path(folder), options.parts)
        return _tell(options.against, Path(folder), options.parts)


def record(out: Path, parts: Sequence[str]) -> None:
    """Write these parts of the record into folders below `out`; what was there before goes."""
    for name in parts:
        started = time.monotonic()
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
        importlib.import_module(f".{name}", __package__).record(out / name)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _tell(before: Path, now: Path, parts: Sequence[str]) -> int:
    found = list(differences(before, now, list(parts)))
    print(*found, sep="\n", end="\n" if found else "")
    print("the records differ" if found else "the records are equal", file=sys.stderr)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.behaviour", description="A record of behaviour.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        command = commands.add_parser(name)
        command.add_argument("--parts", type=_parts, default=list(PARTS), help=f"of {','.join(PARTS)}; default: all")
        if name == "record":
            command.add_argument("--out", type=Path, required=True, metavar="FOLDER")
        else:
            command.add_argument("--against", type=Path, required=True, metavar="FOLDER", help="an earlier record")
            command.add_argument("--now", type=Path, metavar="FOLDER", help="a record to compare; default: this tree's")
    faults = commands.add_parser("faults")
    faults.add_argument("--only", action="append", metavar="NAME", help="a fault; may be given again. Default: all")
    faults.add_argument("--list", action="store_true", help="check that each fault can be placed; run no test")
    return parser


def _parts(text: str) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return found


if __name__ == "__main__":
    sys.exit(main())
