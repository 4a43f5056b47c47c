"""Whether the data of a run are still what its manifest says, asked at the start of every attempt."""

from __future__ import annotations

from relayrun.config.sections.data import DataSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.shards.made_by import check_tokenizer
from relayrun.tokens.shards.manifest import Manifest


def check_data(manifest: Manifest, mixture: list[str], data: DataSection) -> None:
    """Raises FatalTrainingError if a shard is not what it was, InputError if files are only missing.

    A missing file may be a file system that is away for a while: the next attempt may find it again. Nor may a shard
    have been made anew with another tokenizer since the submit; a run that began before this was looked at goes on.
    """
    try:
        manifest.verify(mixture)
    except InputError as error:
        if all(line.endswith(": missing") for line in manifest.differences(mixture)):
            raise
        raise FatalTrainingError(error.message, hint=error.hint) from None
    try:
        allow = data.allow_other_tokenizer or not manifest.tokenizer_ids
        check_tokenizer(manifest, mixture, allow=allow, ends_matter=data.depends_on_ends)
    except InputError as error:
        raise FatalTrainingError(error.message, where=error.where, hint=error.hint) from None
