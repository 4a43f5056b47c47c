"""`relayrun export` and `import`: checkpoints in the formats of other programs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.control.rundir.find_runs import find_run, split_run_and_iteration
from relayrun.errors import InputError, did_you_mean_path, refuse_unwritable
from relayrun.publishing import InputFiles, refuse_existing
from relayrun.train.checkpoint import megatron_folder
from relayrun.train.export import megatron_settings
from relayrun.train.export.source_and_target import CheckpointSource, find_checkpoint, parse_size

EXPORT_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun export`."""
    formats = parser.add_subparsers(dest="format", required=True)
    hf = formats.add_parser("hf", help="a folder for Hugging Face transformers")
    torch = formats.add_parser("torch", help="Megatron's plain torch format, tensor- and pipeline-parallel size 1")
    megatron = formats.add_parser("megatron", help="a folder that Megatron-LM goes on from with --load (torch_dist)")
    for command in (hf, torch, megatron):
        command.add_argument(
            "name",
            metavar="RUN",
            help="run directory, or project/name below logs/runs"
            + ("; RUN:N for iteration N" if command is megatron else "; or a checkpoint folder of Megatron-LM"),
        )
        command.add_argument(
            "--iteration", "--ckpt-step", type=int, metavar="N", help="default: the newest whole checkpoint"
        )
        command.add_argument("--output", type=Path, required=True, metavar="DIR", help="must not exist")
    for command in (hf, torch):
        command.add_argument(
            "--dtype", choices=EXPORT_DTYPES, default="auto", help="auto: that of the checkpoint's weights"
        )
        words = "of a checkpoint of Megatron-LM; default: the one that its arguments name"
        command.add_argument("--tokenizer", "--hf-tokenizer", metavar="PATH", help=words)
    hf.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file of weights (default: 5GB)")
    hf.add_argument("--test-logits", action="store_true", help="compare its logits with megatron-core's")
    words = "import path of a mapping of your own (default: model.mapping of the run, or the built-in that fits)"
    hf.add_argument("--mapping", metavar="MODULE:NAME", help=words)
    words = (
        "Hugging Face folder that the training began with, whose settings are kept (default: that of the run's import)"
    )
    hf.add_argument("--original", type=Path, metavar="DIR", help=words)
    engines, words = ("transformer_engine", "local"), "whose names the weights get"
    torch.add_argument("--transformer-impl", choices=engines, default=engines[0], help=words)
    torch.add_argument("--optimizer", action="store_true", help="with Adam's moments and the schedule")
    hf.set_defaults(run=export_hf)
    torch.set_defaults(run=export_torch)
    megatron.set_defaults(run=export_megatron)


def export_hf(options: argparse.Namespace) -> int:
    """Write a Hugging Face folder. Raises RelayrunError."""
    limit = parse_size(options.max_shard_size)
    read = _inputs(options)
    source = _checked_source(options, read)
    source = source if options.original is None else replace(source, original=options.original)
    if not _is_made(options, read):
        print("\n".join(_write_hf(options, source, read, limit)))
    return 0


def _write_hf(options: argparse.Namespace, source: CheckpointSource, read: InputFiles, limit: int) -> list[str]:
    from relayrun.train.export import compare_logits, huggingface  # torch: seconds
    from relayrun.train.export.torch_dist import new_folder

    with new_folder(options.output, read) as folder:
        made = huggingface.write_huggingface(
            source, folder, dtype=options.dtype, max_shard_size=limit, mapping=options.mapping
        )
        notes = [f"note: {note}" for note in [*made.notes, *compare_logits.check_opens(source, folder)]]
        if options.test_logits:
            found = compare_logits.check_logits(source, folder, made.rounded)
            notes.append(
                f"logits of megatron-core and transformers on {found.tokens} tokens differ by at most "
                f"{found.difference:.2g} (largest logit {found.largest:.3g})"
            )
    files = "1 file" if made.files == 1 else f"{made.files} files"
    size = f"{made.parameters:,} parameters, {made.bytes:,} bytes in {files}"
    return [f"iteration {source.iteration}: {size}: {Path(options.output).absolute()}", *notes]


def export_torch(options: argparse.Namespace) -> int:
    """Write a checkpoint in Megatron's plain torch format. Raises RelayrunError."""
    read = _inputs(options)
    source = _checked_source(options, read)
    if _is_made(options, read):
        return 0
    from relayrun.train.export import megatron  # torch: seconds
    from relayrun.train.export.torch_dist import new_folder

    with new_folder(options.output, read) as folder:
        parameters = megatron.write_torch_format(
            source,
            folder,
            dtype=options.dtype,
            transformer_impl=options.transformer_impl,
            with_optimizer=options.optimizer,
        )
    print(f"iteration {source.iteration}: {parameters:,} parameters: {Path(options.output).absolute()}")
    return 0


def export_megatron(options: argparse.Namespace) -> int:
    """Write a folder that Megatron-LM loads. Raises RelayrunError."""
    read = _inputs(options)
    name, iteration = split_run_and_iteration(options.name)
    source = find_checkpoint(find_run(name), options.iteration if iteration is None else iteration)
    read.add_folder(source.folder)
    if _is_made(options, read):
        return 0
    from relayrun.train.export import megatron  # torch: seconds
    from relayrun.train.export.torch_dist import new_folder

    with new_folder(options.output, read) as folder:
        made = megatron.write_megatron(source, folder)
    what = "weights, optimizer and schedule" if made.optimizer else "weights"
    print(f"iteration {source.iteration}: {made.parameters:,} parameters ({what}): {Path(options.output).absolute()}")
    for note in made.notes:
        print(f"note: {note}")
    return 0


def _inputs(options: argparse.Namespace) -> InputFiles:
    """Return the options for the record of an output, which may be written. Raises InputError."""
    check_outputs({"--output": options.output})
    return InputFiles((), {name: value for name, value in vars(options).items() if name not in ("run", "output")})


def _is_made(options: argparse.Namespace, read: InputFiles) -> bool:
    """Return whether this command has made the output of these files. Raises InputError if something else is there."""
    if read.was_made(options.output):
        return True
    refuse_existing(options.output)
    refuse_unwritable(options.output)
    return False


def _checked_source(options: argparse.Namespace, read: InputFiles) -> CheckpointSource:
    """The checkpoint, which joins `read`, after run, iteration and tokenizer were checked. Raises RelayrunError."""
    folder = Path(options.name).expanduser()
    if (found := megatron_folder.find_megatron_checkpoint(folder, options.iteration, read)) is not None:
        return megatron_settings.megatron_source(found, options.tokenizer)
    if options.tokenizer is not None:
        raise InputError("a run has a tokenizer of its own", where=options.name, hint="leave out --tokenizer")
    source = find_checkpoint(find_run(options.name), options.iteration)
    read.add_folder(source.folder)
    if not source.config.data.mock_data:
        _ = source.tokenizer
    return source


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun import`."""
    formats = parser.add_subparsers(dest="format", required=True)
    hf = formats.add_parser("hf", help="a model of Hugging Face: Llama, Qwen3, Mixtral, Apertus, or by --mapping")
    hf.add_argument("folder", type=Path, metavar="DIR", help="with config.json and *.safetensors")
    hf.add_argument("--output", type=Path, required=True, metavar="CKPT", help="must not exist")
    hf.add_argument("--dtype", choices=EXPORT_DTYPES, default="auto", help="auto: that of the folder's weights")
    words = "as in the model section of the run that starts from it (default: 128)"
    hf.add_argument("--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help=words)
    hf.add_argument("--mapping", metavar="MODULE:NAME", help="import path of a mapping of your own")
    hf.set_defaults(run=import_hf)
    megatron = formats.add_parser("megatron", help="a checkpoint folder of Megatron-LM (torch_dist)")
    megatron.add_argument("folder", metavar="DIR[:ITERATION]", help="default: the iteration that its tracker names")
    megatron.add_argument("--output", type=Path, required=True, metavar="CKPT", help="must not exist")
    words = "as parallel.use_distributed_optimizer of the run that starts from it (default: as it was)"
    megatron.add_argument("--use-distributed-optimizer", action=argparse.BooleanOptionalAction, help=words)
    megatron.add_argument("--weights-only", action="store_true", help="leave the optimizer and the iteration behind")
    megatron.set_defaults(run=import_megatron)


def import_hf(options: argparse.Namespace) -> int:
    """Write a checkpoint from a Hugging Face folder. Raises RelayrunError."""
    output: Path = options.output.absolute()
    read = _inputs(options)
    read.add_folder(options.folder)
    if _is_made(options, read):
        return 0
    if not (options.folder / "config.json").is_file():
        hint = did_you_mean_path(options.folder) or "give a folder that transformers' save_pretrained wrote"
        raise InputError("this is no Hugging Face folder: it has no config.json", where=options.folder, hint=hint)
    from relayrun.train.export import huggingface  # torch: seconds

    made = huggingface.import_huggingface(
        options.folder,
        output,
        dtype=options.dtype,
        divisible_by=options.make_vocab_size_divisible_by,
        mapping=options.mapping,
        read=read,
    )
    print(
        f"{made.vocabulary} tokens, padded to {made.padded_vocabulary}: {output}\n"
        f"the model section for a run config: {output / 'model.yaml'}",
        *(f"\nnote: {note}" for note in made.notes),
        sep="",
    )
    return 0


def import_megatron(options: argparse.Namespace) -> int:
    """Write a checkpoint from a folder of Megatron-LM. Raises RelayrunError."""
    output: Path = options.output.absolute()
    read = _inputs(options)
    name, iteration = split_run_and_iteration(options.folder)
    folder = Path(name).expanduser()
    found = megatron_folder.find_megatron_checkpoint(folder, iteration, read)
    if found is None:
        hint = did_you_mean_path(folder) or "give a folder with latest_checkpointed_iteration.txt, or one of its iter_*"
        raise InputError("this is no checkpoint folder of Megatron-LM (torch_dist)", where=folder, hint=hint)
    if _is_made(options, read):
        return 0
    from relayrun.train.export import megatron  # torch: seconds

    made = megatron.import_megatron(
        found, output, distributed=options.use_distributed_optimizer, weights_only=options.weights_only, read=read
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
