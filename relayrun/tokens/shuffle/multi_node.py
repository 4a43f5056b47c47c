"""A shuffle by several tasks on several nodes, which share folders and nothing else.

A stage begins when all tasks have finished the previous one (submit_reshard.sh: a sequence of Slurm steps):

    begin     task 0 inspects the files, and makes the folders
    scatter   every task scatters some parts of the files to buckets
    measure   task 0 writes the first file, which fixes the number of rows per file
    write     every task writes a run of the other files
    finish    task 0 gives the folder its name, draws the plot, and removes temporary files

A killed task leaves a whole part, a whole file, or nothing: running all stages again, with any number of tasks, does
the missing work.

    TEMP/reshard-NAME-HASH/plan.json             options and files, parts and buckets
    TEMP/reshard-NAME-HASH/part-3.arrow, .npz    see buckets.py
    TEMP/reshard-NAME-HASH/rows.json             rows of a file, and of all
    TEMP/reshard-NAME-HASH/after-7.npy           lengths of the texts of a file, for the plot
    .NAME.reshard/data_7.parquet                 beside the output NAME, whose content it becomes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from relayrun.errors import InputError, RelayrunError, refuse_unwritable
from relayrun.files import free_space, fsync_directory, fsync_tree, read_json, write_atomic, write_json
from relayrun.leftovers import rename_no_replace
from relayrun.tokens.readers.columns import RowFile, check_files
from relayrun.tokens.shuffle import reshard
from relayrun.tokens.shuffle.buckets import output_file_name
from relayrun.tokens.stores import urls

log = logging.getLogger(__name__)


class ReshardTask:
    """Task `task` of `tasks`. Raises InputError if the options name no folder for temporary files."""

    def __init__(self, options: reshard.ReshardOptions, *, task: int, tasks: int) -> None:
        if options.temp_dir is None:
            raise InputError("several tasks need a folder that all of them see", where="--temp-dir")
        self.options, self.task, self.tasks = options, task, tasks
        self.output = Path(os.path.realpath(options.output))
        self.building = self.output.with_name(f".{self.output.name}.reshard")
        place = hashlib.sha256(os.fsencode(self.output)).hexdigest()[:12]
        self.work = Path(os.path.abspath(options.temp_dir)) / f"reshard-{self.output.name}-{place}"

    def run(self, stage: str) -> int | None:
        """Do this task's share of a stage; `finish` returns the number of rows. Raises RelayrunError."""
        if self.task and stage in ("begin", "measure", "finish"):
            return None
        if not self.building.exists() and (rows := reshard.rows_made(self.options, self.output)) is not None:
            if stage != "finish":
                return None
            shutil.rmtree(self.work, ignore_errors=True)  # perhaps half removed by a former start
            return rows
        if self._is_named() and stage != "finish":  # a former start was killed after its last rename
            return None
        does: dict[str, Callable[[], int | None]] = {
            "begin": self._begin,
            "scatter": self._scatter,
            "measure": self._measure,
            "write": self._write,
            "finish": self._finish,
        }
        return does[stage]()

    def check(self) -> None:
        """Check, before the job is queued, a shuffle that has not begun. Writes nothing. Raises RelayrunError."""
        if self.building.exists() or self._is_named():
            return
        plan = reshard.make_shuffle_plan(self.options, tasks=self.tasks)
        refuse_unwritable(self.work)
        # `make_shuffle_plan` has checked the columns of parquet
        lines = [file.path for file in plan.files if file.rows is None]
        skips = self.options.on_error == "skip-line"
        check_files(lines, self.options.column, skip_lines=skips, what="files cannot be shuffled")
        needed, free = sum(file.size for file in plan.files), free_space(self.work)
        if needed <= free:
            return
        words = f"the rows take {needed / 1e9:,.1f} GB unpacked, and {free / 1e9:,.1f} GB are free"
        error = InputError(words, where="--temp-dir", hint="make room, or name a folder on another file system")
        if not lines:
            raise error
        log.warning("%s", error)  # the size of unpacked lines is an estimate

    def _is_named(self) -> bool:
        return self.output.exists() and (self.work / "plan.json").exists() and not self.building.exists()

    def _begin(self) -> None:
        plan = reshard.make_shuffle_plan(self.options, tasks=self.tasks)
        record = _plan_to_json(plan)
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            former = read_json(self.work / "plan.json")
            if former["of"] == record["of"] and self.building.exists():
                return
        for folder in (self.work, self.building):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        write_atomic(self.work / "plan.json", json.dumps(record))  # ASCII: names may hold bytes that are not UTF-8

    def _plan(self) -> reshard.ShufflePlan:
        try:
            record = read_json(self.work / "plan.json")
        except FileNotFoundError:
            raise RelayrunError("another job finished or began anew with this output", where=self.work) from None
        return _plan_from_json(record, self.options)

    def _scatter(self) -> None:
        plan = self._plan()
        reshard.scatter_parts(plan, range(self.task, len(plan.parts), self.tasks), self.work)

    def _measure(self) -> None:
        if not (self.work / "rows.json").exists():
            plan = self._plan()
            buckets = reshard.open_buckets(plan, self.work)
            rows = reshard.write_first_file(plan, buckets, self.building, self.work)
            found = {"of_a_file": rows, "files": reshard.count_files(buckets, rows), "all": int(buckets.counts.sum())}
            write_json(self.work / "rows.json", found)

    def _write(self) -> None:
        plan, rows = self._plan(), read_json(self.work / "rows.json")
        count = rows["files"] - 1
        mine = range(1 + self.task * count // self.tasks, 1 + (self.task + 1) * count // self.tasks)
        missing = [number for number in mine if not (self.building / output_file_name(number)).exists()]
        if missing:
            buckets = reshard.open_buckets(plan, self.work)
            reshard.write_files(plan, buckets, missing, rows["of_a_file"], self.building, self.work)

    def _finish(self) -> int:
        rows: dict[str, int] = read_json(self.work / "rows.json")
        if not self._is_named():
            names = [output_file_name(number) for number in range(rows["files"])]
            if missing := [name for name in names if not (self.building / name).exists()]:
                words = f"{len(missing)} files are missing, the first is {missing[0]}"
                raise RelayrunError(words, where=self.building, hint="submit again: what is done is kept")
            for name in {*os.listdir(self.building)} - {*names}:  # a killed task left the others half written
                os.unlink(self.building / name)
            plan = self._plan()
            if _plan_to_json(plan)["of"] != json.loads((self.work / "plan.json").read_text())["of"]:
                hint = "submit again, which begins anew"
                raise InputError("files changed while they were read", where=self.options.dataset_folder, hint=hint)
            read = reshard.input_files(self.options, (file.path for file in plan.files))
            read.notes["lengths"] = reshard.picture_points(reshard.open_buckets(plan, self.work), len(names), self.work)
            read.write_record(self.building)
            fsync_tree(self.building)
            try:
                rename_no_replace(self.building, self.output)
            except FileExistsError:
                hint = "move it away, submit again"
                raise InputError("the output came to be meanwhile", where=self.output, hint=hint) from None
            fsync_directory(self.output.parent)
        reshard.draw_picture(self.output)
        shutil.rmtree(self.work)
        return rows["all"]


def _plan_to_json(plan: reshard.ShufflePlan) -> dict[str, Any]:
    """Return the content of plan.json; `of` holds everything that the output bytes depend on."""
    names = [field.name for field in fields(plan.options) if field.name not in reshard.LOCAL_SETTINGS]
    options = {name: getattr(plan.options, name) for name in names}
    options["dataset_folder"] = urls.absolute_path(plan.options.dataset_folder)
    changed = (0 if urls.is_url(file.path) else os.stat(file.path).st_mtime_ns for file in plan.files)
    files = [[file.path, file.size, file.rows, file.page, at] for file, at in zip(plan.files, changed, strict=True)]
    schema = plan.files[0].schema.serialize().to_pybytes().hex()
    return {"of": {**options, "files": files, "schema": schema}, "parts": plan.parts, "buckets": plan.buckets}


def _plan_from_json(record: dict[str, Any], options: reshard.ReshardOptions) -> reshard.ShufflePlan:
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(record["of"]["schema"])))
    files = tuple(
        RowFile(path=path, size=size, rows=rows, page=page, schema=schema)
        for path, size, rows, page, _ in record["of"]["files"]
    )
    parts = tuple((first, last) for first, last in record["parts"])
    return reshard.ShufflePlan(options=options, files=files, parts=parts, buckets=record["buckets"])
