"""Where the dumps of a metadata folder stand: done, tokens, tokens per second, what is left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.errors import InputError
from relayrun.files import read_json
from relayrun.tokenization.metadata import MetadataFolder
from relayrun.tokenization.record import NAME


@dataclass(frozen=True, kw_only=True)
class DumpStatus:
    """One dump."""

    index: int
    state: str
    """done, open (some shards are recorded or being written), waiting."""
    shards: int
    """Recorded as finished."""
    of: int
    """0 where no job has dealt the files yet."""
    tokens: int
    """Of finished shards."""
    worker_seconds: float
    """That finished shards took, summed over the workers."""
    skipped_files: int

    @property
    def tokens_per_second(self) -> float:
        """Of one worker, which is one core."""
        return self.tokens / self.worker_seconds if self.worker_seconds else 0.0


def read_status(metadata_folder: str | os.PathLike[str]) -> list[DumpStatus]:
    """All dumps of a metadata folder, by number. Raises InputError if it is none."""
    metadata = MetadataFolder(metadata_folder)
    finished, pending = metadata.finished(), metadata.pending()
    if not finished and not pending:
        raise InputError("there are no dumps here", where=metadata.path, hint="prepare_dumps.py makes them")
    return [_dump(metadata, index, done=index in set(finished)) for index in sorted({*finished, *pending})]


def table(dumps: list[DumpStatus]) -> str:
    """For the terminal: a line a dump, and the totals."""
    rows = [("dump", "state", "shards", "tokens", "Mtok/s a core", "left out")]
    rows += [
        (str(d.index), d.state, f"{d.shards}/{d.of}" if d.of else "-", f"{d.tokens:,}",
         f"{d.tokens_per_second / 1e6:.2f}" if d.worker_seconds else "-", f"{d.skipped_files} files")
        for d in dumps
    ]  # fmt: skip
    tokens, seconds = sum(d.tokens for d in dumps), sum(d.worker_seconds for d in dumps)
    done = sum(d.state == "done" for d in dumps)
    rate, skipped = f"{tokens / seconds / 1e6:.2f}" if seconds else "-", sum(d.skipped_files for d in dumps)
    rows.append(("total", f"{done}/{len(dumps)} done", "", f"{tokens:,}", rate, f"{skipped} files"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def _dump(metadata: MetadataFolder, index: int, *, done: bool) -> DumpStatus:
    output = metadata.tokenized_link / f"dump-{index}"
    record = _record(output)
    shards: Mapping[str, Any] = record.get("shards", {})
    begun = bool(shards) or any(output.glob("*.tmp"))
    return DumpStatus(
        index=index,
        state="done" if done else "open" if begun else "waiting",
        shards=len(shards),
        of=len(record.get("parts", {})),
        tokens=sum(task["tokens"] for task in shards.values()),
        worker_seconds=sum(task["seconds"] for task in shards.values()),
        skipped_files=sum(len(task["skipped"]) for task in shards.values()),
    )


def finished_shards(output: Path) -> int:
    """Of the folder of a dump."""
    return len(_record(output).get("shards", {}))


def _record(output: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = read_json(output / NAME)
    except FileNotFoundError:
        return {}
    except ValueError:
        raise InputError("not a record of tokenization", where=output / NAME) from None
    return record
