"""`relayrun import`: a checkpoint, to start a run from, of another program's model."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.cli.export import DTYPES
from relayrun.config.writable import check_outputs
from relayrun.errors import InputError, nearest_path
from relayrun.export.target import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun import`."""
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
    parser.set_defaults(run=import_hf)


def import_hf(options: argparse.Namespace) -> int:
    """Write a checkpoint from a Hugging Face folder. Raises RelayrunError."""
    output: Path = options.output.absolute()
    check_outputs({"--output": output})
    check_target(output)
    if not (options.folder / "config.json").is_file():
        hint = nearest_path(options.folder) or "give a folder that transformers' save_pretrained wrote"
        raise InputError("this is no Hugging Face folder: it has no config.json", where=options.folder, hint=hint)
    from relayrun.export import importer  # torch: seconds

    made = importer.import_hf(
        options.folder, output, dtype=options.dtype, divisible_by=options.make_vocab_size_divisible_by
    )
    print(
        f"{made.vocabulary} tokens, padded to {made.padded_vocabulary}: {output}\n"
        f"the model section for a run config: {output / 'model.yaml'}"
    )
    return 0
