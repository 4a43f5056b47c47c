"""Copies of W&B runs in another project: history, config, summary, name, tags, notes, group.

History is read by scan (every row, not a sample) and written with its steps and times. A copy has its source's id, so a
second call goes on where the first was cut off, or sends what the source has meanwhile, and never writes a row twice.
Media (images, tables, artifacts) stay where they are: a row's reference to them is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from relayrun.errors import InputError

log = logging.getLogger(__name__)

ROWS = 1000
"""Rows of the history that are asked for at a time."""


class SourceRun(Protocol):
    """What is read of a `wandb.apis.public.Run`."""

    id: str
    name: str
    config: dict[str, Any]
    summary_metrics: dict[str, Any]
    tags: list[str]
    notes: str | None
    group: str | None

    def scan_history(self, *, page_size: int, min_step: int, use_cache: bool) -> Iterable[dict[str, Any]]: ...


class Api(Protocol):
    """What is asked of a `wandb.Api`."""

    def run(self, path: str) -> SourceRun: ...

    def runs(self, path: str) -> Iterable[SourceRun]: ...


@dataclass(frozen=True)
class Project:
    """A project by entity (user or team) and name."""

    entity: str
    name: str

    def __str__(self) -> str:
        return f"{self.entity}/{self.name}"


def copy_project(
    api: Api, source: Project, target: Project, *, run_ids: list[str], new_name: str | None = None
) -> Iterator[str]:
    """Copy these runs, or all; yield a line for each. Raises InputError."""
    if source == target:
        raise InputError(
            "source and destination are the same project, so a copy would be its own source",
            where=str(source),
            hint="give another project with -dp",
        )
    if new_name is not None and len(run_ids) != 1:
        raise InputError("a new name is for one run", hint="give the run with -r")
    for run in [api.run(f"{source}/{run_id}") for run_id in run_ids] if run_ids else api.runs(str(source)):
        yield copy_run(run, target, new_name or run.name)


def copy_run(source: SourceRun, target: Project, name: str) -> str:
    """Write one run, or what is missing of it; return what was done, in words."""
    import wandb

    made = wandb.init(
        entity=target.entity,
        project=target.name,
        id=source.id,
        name=name,
        config=source.config,
        tags=source.tags,
        notes=source.notes,
        group=source.group or None,
        resume="allow",
        mode="online",
        settings=wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
        ),
    )
    first, rows, left_out = made.starting_step, 0, set()
    for row in source.scan_history(page_size=ROWS, min_step=first, use_cache=False):
        step = int(row["_step"])
        if step < first:
            continue
        values = {key: value for key, value in row.items() if value is not None and key not in ("_step", "_runtime")}
        left_out |= {key for key, value in values.items() if _is_media(value)}
        made.log({key: value for key, value in values.items() if not _is_media(value)}, step=step)
        rows += 1
    made.summary.update(
        {
            key: value
            for key, value in source.summary_metrics.items()
            if not key.startswith("_") and not _is_media(value)
        }
    )
    made.finish()
    if left_out:
        log.warning("%s: media are not copied: %s", source.id, ", ".join(sorted(left_out)))
    return f"{source.id} ({name}): {rows:,} rows" + (f" from step {first} on" if first else "") + f" to {target}"


def _is_media(value: Any) -> bool:
    return isinstance(value, dict) and "_type" in value
