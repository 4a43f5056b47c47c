"""`relayrun import`: a checkpoint, to start a run from, of another program's model."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.cli.model.export import EXPORT_DTYPES
from relayrun.config.compose.writable import check_outputs
from relayrun.control.rundir.find_runs import split_iteration
from relayrun.errors import InputError, did_you_mean_path
from relayrun.train.checkpoint import megatron_folder
from relayrun.train.export.target import check_target


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun import`."""
    formats = parser.add_subparsers(dest="format", required=True)
    hf = formats.add_parser("hf", help="a model of Hugging Face: Llama, Qwen3, Mixtral, Apertus, or by --mapping")
    hf.add_argument("folder", type=Path, metavar="DIR", help="with config.json and *.safetensors")
    hf.add_argument("--output", type=Path, required=True, metavar="CKPT", help="must not exist")
    hf.add_argument("--dtype", choices=EXPORT_DTYPES, default="auto", help="auto: that of the folder's weights")
    hf.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="as in the model section of the run that starts from it (default: 128)",
    )
    hf.add_argument("--mapping", metavar="MODULE:NAME", help="import path of a mapping of your own")
    hf.set_defaults(run=import_hf)
    megatron = formats.add_parser("megatron", help="a checkpoint folder of Megatron-LM (torch_dist)")
    megatron.add_argument("folder", metavar="DIR[:ITERATION]", help="default: the iteration that its tracker names")
    megatron.add_argument("--output", type=Path, required=True, metavar="CKPT", help="must not exist")
    megatron.add_argument(
        "--use-distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        help="as parallel.use_distributed_optimizer of the run that starts from it (default: as it was)",
    )
    megatron.add_argument("--weights-only", action="store_true", help="leave the optimizer and the iteration behind")
    megatron.set_defaults(run=import_megatron)


def import_hf(options: argparse.Namespace) -> int:
    """Write a checkpoint from a Hugging Face folder. Raises RelayrunError."""
    output: Path = options.output.absolute()
    check_outputs({"--output": options.output})
    check_target(output)
    if not (options.folder / "config.json").is_file():
        hint = did_you_mean_path(options.folder) or "give a folder that transformers' save_pretrained wrote"
        raise InputError("this is no Hugging Face folder: it has no config.json", where=options.folder, hint=hint)
    from relayrun.train.export import importer  # torch: seconds

    made = importer.import_huggingface(
        options.folder,
        output,
        dtype=options.dtype,
        divisible_by=options.make_vocab_size_divisible_by,
        mapping=options.mapping,
    )
    print(
        f"{made.vocabulary} tokens, padded to {made.padded_vocabulary}: {output}\n"
        f"the model section for a run config: {output / 'model.yaml'}"
    )
    return 0


def import_megatron(options: argparse.Namespace) -> int:
    """Write a checkpoint from a folder of Megatron-LM. Raises RelayrunError."""
    output: Path = options.output.absolute()
    check_outputs({"--output": options.output})
    check_target(output)
    name, iteration = split_iteration(options.folder)
    folder = Path(name).expanduser()
    found = megatron_folder.find_megatron_checkpoint(folder, iteration)
    if found is None:
        hint = did_you_mean_path(folder) or "give a folder with latest_checkpointed_iteration.txt, or one of its iter_*"
        raise InputError("this is no checkpoint folder of Megatron-LM (torch_dist)", where=folder, hint=hint)
    from relayrun.train.export import megatron_importer  # torch: seconds

    made = megatron_importer.import_megatron(
        found, output, distributed=options.use_distributed_optimizer, weights_only=options.weights_only
    )
    what = (
        f"iteration {made.iteration}, {made.consumed_samples} samples, weights and optimizer"
        if made.optimizer
        else "weights alone"
    )
    print(f"{what}: {output}\nsections for a run config: {output / 'run.yaml'}")
    for words in made.not_taken:
        print(f"not taken: {words}")
    return 0
