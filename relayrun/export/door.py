"""`relayrun export` and `relayrun import`: arguments to calls, results to lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.export import card, huggingface, importer, torch_format
from relayrun.export.folder import new_folder
from relayrun.export.source import find
from relayrun.rundir.find import find_run


def export_hf(options: argparse.Namespace) -> int:
    """Write a Hugging Face folder. Raises RelayrunError."""
    limit = huggingface.parse_size(options.max_shard_size)
    source = find(find_run(options.name), options.iteration)
    compared = ""
    with new_folder(options.output) as folder:
        made = huggingface.write(source, folder, dtype=options.dtype, max_shard_size=limit)
        if options.readme:
            (folder / "README.md").write_text(card.text(source, dtype=made.dtype), encoding="utf-8")
        if options.test_logits:
            from relayrun.export import logits

            found = logits.check(source, folder)
            compared = (
                f"logits of megatron-core and transformers on {found.tokens} tokens differ by at most "
                f"{found.difference:.2g} (largest logit {found.largest:.3g})"
            )
    files = "1 file" if made.files == 1 else f"{made.files} files"
    print(
        f"iteration {source.iteration}: {made.parameters:,} parameters, {made.bytes:,} bytes in {files}: "
        f"{Path(options.output).absolute()}"
    )
    if compared:
        print(compared)
    return 0


def export_torch(options: argparse.Namespace) -> int:
    """Write a checkpoint in Megatron's plain torch format. Raises RelayrunError."""
    source = find(find_run(options.name), options.iteration)
    with new_folder(options.output) as folder:
        parameters = torch_format.write(source, folder, dtype=options.dtype, transformer_impl=options.transformer_impl)
    print(f"iteration {source.iteration}: {parameters:,} parameters: {Path(options.output).absolute()}")
    return 0


def import_hf(options: argparse.Namespace) -> int:
    """Write a checkpoint from a Hugging Face folder. Raises RelayrunError."""
    output: Path = options.output.absolute()
    made = importer.import_hf(
        options.folder, output, dtype=options.dtype, divisible_by=options.make_vocab_size_divisible_by
    )
    print(
        f"{made.vocabulary} tokens, padded to {made.padded_vocabulary}: {output}\n"
        f"the model section for a run config: {output / 'model.yaml'}"
    )
    return 0
