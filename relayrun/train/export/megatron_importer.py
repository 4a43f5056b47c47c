"""A checkpoint to begin a run with, from a folder of Megatron-LM: copied, in the kind that the run needs, with hashes.

A run can begin with such a folder as it lies, too. A copy does not depend on what becomes of the original, has hashes
to be compared with, and its optimizer may be the other kind: plain, or distributed over the data-parallel ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.errors import InputError
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.checkpoint.megatron_state import MEGATRON_LAYOUT, with_torch_tensors
from relayrun.train.export import megatron_settings, optimizer_state
from relayrun.train.export.contents import CheckpointContents
from relayrun.train.export.folder import new_folder
from relayrun.train.export.llama import LLAMA
from relayrun.train.export.model_mapping import EMBEDDING
from relayrun.train.export.reader import CheckpointReader


@dataclass(frozen=True, kw_only=True)
class MegatronImport:
    """What an import took, and what it left."""

    iteration: int
    consumed_samples: int
    optimizer: bool
    """Whether Adam's moments came along; if not, the checkpoint holds weights alone."""
    not_taken: list[str]
    """In words."""


def import_megatron(
    checkpoint: MegatronCheckpoint, output: Path, *, distributed: bool | None = None, weights_only: bool = False
) -> MegatronImport:
    """Write the checkpoint `output`, whole or not at all.

    `distributed`: the kind of optimizer of the run that begins with it; None: as it was. Raises InputError if it is no
    model that a run can train, or is torn.
    """
    sections = megatron_settings.run_sections(checkpoint)
    model = megatron_settings.model_section(checkpoint)
    reader = CheckpointReader(checkpoint.folder)
    rows = reader.shapes.get(EMBEDDING, (0,))[0]
    weights = LLAMA.megatron_shapes(model, rows)
    extra = sorted(key for key in reader.shapes if key not in weights)
    LLAMA.check({key: shape for key, shape in reader.shapes.items() if key in weights}, model, rows, checkpoint.folder)
    kind = checkpoint.distributed is not None if distributed is None else distributed
    adam, why = _adam(checkpoint, reader) if not weights_only else (None, "weights alone were asked for")
    with new_folder(output) as made:
        contents = CheckpointContents()
        for key in weights:
            contents.copy_tensor(reader, key, key)
        contents.add_extra_states(weights)
        common: dict[str, Any] = {"iteration": 0}
        if adam is not None:
            adam.copy_into(contents, weights, distributed=kind, precision=checkpoint.precision)
            common = {
                "optimizer": adam.plain(distributed=kind, precision=checkpoint.precision),
                "layout": MEGATRON_LAYOUT,
                "fixed": megatron_settings.fixed_settings(checkpoint) | {"parallel.use_distributed_optimizer": kind},
                "data": None,
                "progress": checkpoint.progress(),
            }
        written = contents.write(made, common)
        sections["parallel"] = {"use_distributed_optimizer": kind}
        origin = f"# of {checkpoint.folder.absolute()}\n"
        beginning: dict[str, Any] = {"model": sections["model"]}
        if adam is not None:
            beginning["iteration"] = checkpoint.iteration
        (made / "model.yaml").write_text(origin + yaml_file.dump_yaml(beginning), encoding="utf-8")
        (made / "run.yaml").write_text(origin + yaml_file.dump_yaml(sections), encoding="utf-8")
        arguments = json.dumps(megatron_settings.plain_args(checkpoint), indent=1)
        (made / "arguments.json").write_text(arguments + "\n", encoding="utf-8")
        written.add_checksums(checkpoint.iteration)
    left = megatron_settings.describe_not_taken(checkpoint, optimizer=why)
    left += [f"{key} {list(reader.shapes[key])}: the model has no such weight" for key in extra]
    return MegatronImport(
        iteration=checkpoint.iteration,
        consumed_samples=checkpoint.consumed_samples,
        optimizer=adam is not None,
        not_taken=left,
    )


def _adam(
    checkpoint: MegatronCheckpoint, reader: CheckpointReader
) -> tuple[optimizer_state.AdamState | None, str | None]:
    """Adam's state; or None, and why it is left behind."""
    if checkpoint.optimizer is None:
        return None, "it was saved without its optimizer"
    if (name := checkpoint.args.get("optimizer", "adam")) != "adam":
        return None, f"its optimizer is {name}, and runs here have Adam"
    try:
        return optimizer_state.find_adam_state(reader, with_torch_tensors(checkpoint.optimizer)), None
    except InputError as error:
        return None, error.message
