#!/usr/bin/env python3
"""Copy runs of a W&B project into another one, for a report or to show some runs of many.

copy_wandb_project.py -se me -sp experiments -de my-team -dp paper -r f5v94x1q 8k2j0c3w -n baseline larger-batch

Every row of the history (no sample) with its step and time, system metrics, files, config, summary, name, tags. A copy
has its source's id, so a second call goes on where the first ended and never writes a row twice; files are sent again.
System metrics keep their times; their running time counts from the copy's start, as in W&B. Media (images, tables,
artifacts) and references to them are not copied.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relayrun.errors import InputError, run_main
from relayrun.train.reporting.trackers import wandb_client_settings

if TYPE_CHECKING:
    import wandb
    from wandb.apis.public import Run as PublicRun

log = logging.getLogger("__main__")

HISTORY_ROWS = 1000
"""Rows of the history per request."""
SYSTEM_ROWS = 100_000
"""Largest number of system metric rows: W&B returns them as one sample, complete up to this size."""
WRITTEN_BY_THE_CLIENT = ("config.yaml", "wandb-summary.json", "wandb-history.jsonl", "wandb-events.jsonl")
"""Files of every run that the copy's own client writes."""


@dataclass(frozen=True)
class WandbProject:
    """Project by entity (user or team) and name."""

    entity: str
    name: str

    def __str__(self) -> str:
        return f"{self.entity}/{self.name}"


def copy_project(
    api: wandb.Api, source: WandbProject, target: WandbProject, *, run_ids: Sequence[str], names: Sequence[str] = ()
) -> Iterator[str]:
    """Copy these runs, or all; yield a line for each. `names`: of the copies, one per run. Raises InputError."""
    if source == target:
        raise InputError(
            "source and destination are the same project, so a copy would be its own source",
            where=str(source),
            hint="give another project with -dp",
        )
    if names and len(names) != len(run_ids):
        raise InputError(
            f"{len(names)} names (-n) for {len(run_ids)} runs (-r): each run gets one, in the same order",
            hint="name every run with -r, and give as many names" if run_ids else "name the runs with -r",
        )
    found = [api.run(f"{source}/{run_id}") for run_id in run_ids] if run_ids else api.runs(str(source))
    for number, run in enumerate(found):
        yield copy_run(api, run, target, names[number] if names else run.name)


def copy_run(api: wandb.Api, source: PublicRun, target: WandbProject, name: str) -> str:
    """Write one run, or its missing rows; return a summary."""
    import wandb

    system = source.history(samples=SYSTEM_ROWS, stream="system", pandas=False)
    with tempfile.TemporaryDirectory() as folder:  # the client links its uploads until it has finished
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
            settings=wandb_client_settings(),
        )
        first, rows, left_out = made.starting_step, 0, set()
        for row in source.scan_history(page_size=HISTORY_ROWS, min_step=first, use_cache=False):
            step = int(row["_step"])
            if step < first:
                continue
            values = {
                key: value for key, value in row.items() if value is not None and key not in ("_step", "_runtime")
            }
            left_out |= {key for key, value in values.items() if _is_media(value)}
            made.log({key: value for key, value in values.items() if not _is_media(value)}, step=step)
            rows += 1
        _send_system(made, system, behind=_newest_system(api, target, source.id) if made.resumed else None)
        files = _send_files(made, source, folder)
        summary = source.summary_metrics.items()
        made.summary.update({key: each for key, each in summary if key[:1] != "_" and not _is_media(each)})
        made.finish()
    if left_out:
        log.warning("%s: media are not copied: %s", source.id, ", ".join(sorted(left_out)))
    since = f" from step {first} on" if first else ""
    with_files = f" and {files} file{'' if files == 1 else 's'}" if files else ""
    return f"{source.id} ({name}): {rows:,} rows{since}{with_files} to {target}"


def _newest_system(api: wandb.Api, target: WandbProject, run_id: str) -> float | None:
    """Return the time of the newest system metrics of a copy, in seconds since 1970; None without any."""
    there = api.run(f"{target}/{run_id}").history(samples=SYSTEM_ROWS, stream="system", pandas=False)
    return max((float(row["_timestamp"]) for row in there), default=None)


def _send_system(made: Any, rows: Iterable[dict[str, Any]], *, behind: float | None) -> None:
    """Send system metrics later than `behind` with their times.

    wandb has no public method for it: its client only samples its own machine, with the present time.
    """
    from wandb.proto import wandb_internal_pb2 as pb

    interface = made._interface
    for row in rows:
        if behind is not None and row["_timestamp"] <= behind:
            continue
        stats: Any = pb.StatsRecord()  # type: ignore[attr-defined]
        stats.timestamp.FromNanoseconds(round(row["_timestamp"] * 1e9))
        for key, value in row.items():
            if value is not None and not key.startswith("_"):
                stats.item.add(key=key.removeprefix("system."), value_json=json.dumps(value))
        interface._publish(interface._make_record(stats=stats))


def _send_files(made: Any, source: PublicRun, folder: str) -> int:
    count = 0
    for file in source.files():
        if file.name in WRITTEN_BY_THE_CLIENT or file.name.startswith("media/"):
            continue
        file.download(folder, replace=True)
        made.save(f"{folder}/{file.name}", base_path=folder, policy="now", glob=False)
        count += 1
    return count


def _is_media(value: Any) -> bool:
    return isinstance(value, dict) and "_type" in value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-se", "--src-entity", "--source-entity", required=True, metavar="ENTITY", help="user or team")
    parser.add_argument("-sp", "--src-project", "--source-project", required=True, metavar="PROJECT")
    parser.add_argument("-de", "--dst-entity", "--destination-entity", required=True, metavar="ENTITY")
    parser.add_argument("-dp", "--dst-project", "--destination-project", required=True, metavar="PROJECT")
    parser.add_argument(
        "-r", "--runs", "--run-id", nargs="*", default=[], metavar="ID", help="default: all runs of the project"
    )
    parser.add_argument(
        "-n", "--names", "--new-name", nargs="*", default=[], metavar="NAME", help="of the copies, one for each of -r"
    )
    options = parser.parse_args()
    import wandb

    try:
        for line in copy_project(
            wandb.Api(),
            WandbProject(options.src_entity, options.src_project),
            WandbProject(options.dst_entity, options.dst_project),
            run_ids=options.runs,
            names=options.names,
        ):
            print(line, flush=True)
    except (wandb.Error, ValueError) as error:  # wandb's Api says with ValueError what it does not find
        raise InputError(f"W&B: {error}") from None


if __name__ == "__main__":
    sys.exit(run_main(main))
