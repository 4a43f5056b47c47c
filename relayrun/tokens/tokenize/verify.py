"""Whether the finished dumps of a dataset hold what their files hold; those with faults are opened again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.verify import verify_shards
from relayrun.tokens.tokenize.metadata import MetadataFolder
from relayrun.tokens.tokenize.record import FolderRecord
from relayrun.tokens.tokenize.retokenize import compare_with_source, print_comparison


@dataclass(frozen=True, kw_only=True)
class VerifiedDump:
    """One finished dump, and what is wrong with its shards."""

    index: int
    shards: int
    documents: int
    """Documents that were tokenized again from their files."""
    faults: tuple[str, ...]
    closed: str | None = None
    """Why a dump with faults could not be opened again."""

    def summary(self) -> str:
        """One line for the terminal, and one for each fault."""
        lines = [f"dump {self.index}: {fault}" for fault in self.faults]
        end = "opened again: submit, and what is wrong is made anew" if self.faults else "no fault"
        if self.closed is not None:
            end = f"stays finished ({self.closed}): verify it again later"
        head = f"dump {self.index}: {self.shards:,} shards, {self.documents:,} documents tokenized again"
        return "\n".join([*lines, f"{head}: {end}"])


def verify_dumps(
    metadata_folder: str | os.PathLike[str],
    *,
    workers: int,
    full: bool = False,
    temp_dir: str | None = None,
    report: Callable[[VerifiedDump], None] = lambda verified: None,
) -> list[VerifiedDump]:
    """Check every finished dump: its shards by their checksums, a sample of documents (`full`: all) by their files.

    The paths file of a dump with faults goes back to those that are to be tokenized, where the next submit makes its
    faulty shards again and keeps the others. Raises InputError where no dump is finished.
    """
    metadata = MetadataFolder(metadata_folder)
    if not metadata.finished():
        raise InputError("no dump is finished here", where=metadata.path, hint="`relayrun dumps status` tells more")
    done = []
    for index in metadata.finished():
        verified = _verify_dump(metadata.tokenized_link.resolve() / f"dump-{index}", index, full, workers, temp_dir)
        if verified.faults:
            try:
                with metadata.hold():
                    metadata.reopen(index)
            except RelayrunError as error:
                verified = replace(verified, closed=error.message)
        report(verified)
        done.append(verified)
    return done


def _verify_dump(folder: Path, index: int, full: bool, workers: int, temp_dir: str | None) -> VerifiedDump:
    try:
        record = FolderRecord.read(folder)
        prefixes = find_prefixes([folder])
    except (InputError, FileNotFoundError) as error:  # shards that are gone, or a half of one
        return VerifiedDump(index=index, shards=0, documents=0, faults=(str(error).splitlines()[0],))
    there = {os.path.basename(prefix) for prefix in prefixes}
    faults = [f"{name} is gone" for name, task in record.tasks.items() if task.tokens and name not in there]
    checked = verify_shards(prefixes, eod=record.settings["eos"], threads=workers)
    faults += [f"{each.prefix}: {fault}" for each in checked for fault in each.faults]
    compared = compare_with_source(
        [each.prefix for each in checked if not each.faults],
        full=full,
        workers=workers,
        temp_dir=temp_dir,
        report=lambda each: print_comparison(each) if each.fault is None else None,
    )
    faults += [f"{each.prefix}: {each.fault}" for each in compared if each.fault is not None]
    return VerifiedDump(
        index=index, shards=len(checked), documents=sum(each.documents for each in compared), faults=tuple(faults)
    )
