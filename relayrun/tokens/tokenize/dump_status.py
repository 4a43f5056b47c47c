"""Progress of the dumps of a metadata folder, from files only: state, tokens, speed, remaining time, failures."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.files import read_json
from relayrun.terminal import format_table, show_in_place, terminal_width
from relayrun.tokens.readers.faults import MAX_EXAMPLES, describe_bad_lines
from relayrun.tokens.tokenize.dumps import DEDUP_WORK, DumpsFolder
from relayrun.tokens.tokenize.shard_folder import (
    STALE_SECONDS,
    FolderRecord,
    RunningTask,
    TaskRecord,
    describe_step_counts,
    read_progress,
)

ERROR_FILE = "error.txt"
"""Error message of a failed dump, beside its shards."""

STATUS_COLUMNS = ("dump", "state", "shards", "tokens|n", "Mtok/s node|n", "Mtok/s core|n", "ETA|n", "node", "left out")
GONE_SECONDS = 600.0
"""`watch_status` stops waiting for a stalled dump that reported nothing for so long."""


@dataclass(frozen=True, kw_only=True)
class DumpStatus:
    """Status of one dump."""

    index: int
    state: str
    """State: done, running, stalled (tasks have reported nothing for a minute), failed, open (some shards are done, no
    job works on the others), waiting."""
    finished: tuple[TaskRecord, ...]
    """Records of the finished shards."""
    of: int
    """All shards; 0 until a job has dealt the files."""
    bytes: int
    """Bytes of all input files; 0 if unknown."""
    running: tuple[RunningTask, ...]
    """Tasks that reported within the last minute."""
    silent: tuple[RunningTask, ...]
    """Unfinished tasks that did not."""
    error: str | None
    """Error message of a failed dump."""

    @property
    def finished_tokens(self) -> int:
        return sum(task.tokens for task in self.finished)

    @property
    def tokens(self) -> int:
        """Tokens of finished shards and running tasks."""
        return self.finished_tokens + sum(task.tokens for task in self.running)

    @property
    def worker_seconds(self) -> float:
        """Seconds of finished shards and running tasks, summed over the workers."""
        return sum(task.seconds for task in self.finished) + sum(task.at - task.started for task in self.running)

    @property
    def node_rate(self) -> float:
        """Tokens per second of the node: now, or over the time in which at least one worker made a finished shard."""
        if self.running:
            return sum(task.tokens_per_second for task in self.running)
        busy = _covered_seconds((task.started, task.started + task.seconds) for task in self.finished)
        return self.finished_tokens / busy if busy else 0.0

    @property
    def core_rate(self) -> float:
        """Tokens per second of one worker, which is one core."""
        return self.tokens / self.worker_seconds if self.worker_seconds > 0 else 0.0

    @property
    def nodes(self) -> str:
        return ",".join(sorted({task.node for task in (*self.running, *self.silent)}))

    def counts(self, name: str) -> Counter[str]:
        """Return the sum of a count of the finished shards: `bad_lines` or `losses`."""
        return sum((Counter(getattr(task, name)) for task in self.finished), Counter())


def read_status(metadata_folder: str | os.PathLike[str], *, now: float | None = None) -> list[DumpStatus]:
    """Return the status of all dumps of a metadata folder, by number. `now`: seconds since 1970. Raises InputError."""
    metadata = DumpsFolder(metadata_folder)
    # in this order: a dump that moves in between is in both
    pending, finished = set(metadata.pending()), set(metadata.finished())
    metadata.paths_files()
    now, sizes = time.time() if now is None else now, metadata.sizes()
    return [
        _read_dump(metadata, index, now, done=index in finished, size=sizes.get(index, 0))
        for index in sorted(finished | pending)
    ]


def input_bytes(dumps: Iterable[DumpStatus]) -> tuple[int, int]:
    """Return the bytes of input that are tokenized, and all."""
    dumps = [*dumps]
    read = sum(file[1] for dump in dumps for task in dump.finished for file in task.inputs)
    return read + sum(task.bytes_read for dump in dumps for task in dump.running), sum(dump.bytes for dump in dumps)


def seconds_left(dumps: Iterable[DumpStatus], *, tokens_per_byte: float, rate: float) -> float | None:
    """Return the seconds until `dumps` are done at `rate` tokens per second; None if unknown."""
    left = 0.0
    for dump in dumps:
        if dump.state != "done":
            if not dump.bytes:
                return None
            left += max(dump.bytes * tokens_per_byte - dump.tokens, 0)
    return left / rate if rate and tokens_per_byte else None


def mean_tokens_per_byte(dumps: Sequence[DumpStatus]) -> float:
    """Return the tokens per byte of the files read so far; 0 before the first."""
    read, _ = input_bytes(dumps)
    tokens = sum(dump.finished_tokens + sum(t.tokens for t in dump.running if t.bytes_read) for dump in dumps)
    return tokens / read if read else 0.0


def status_table(dumps: Sequence[DumpStatus]) -> str:
    """Format a line per dump, the totals, and the failures for the terminal."""
    density = mean_tokens_per_byte(dumps)
    rows: list[tuple[str, ...]] = []
    for d in dumps:
        left = seconds_left([d], tokens_per_byte=density, rate=d.node_rate) if d.running else None
        state = str(d.index), d.state, f"{len(d.finished)}/{d.of}" if d.of else "-"
        speed = f"{d.tokens:,}", _rate(d.node_rate), _rate(d.core_rate), _duration(left)
        rows.append((*state, *speed, d.nodes or "-", _left_out([d])))
    now = sum(dump.node_rate for dump in dumps if dump.running)
    seconds = sum(dump.worker_seconds for dump in dumps)
    tokens, left = sum(dump.tokens for dump in dumps), seconds_left(dumps, tokens_per_byte=density, rate=now)
    done, nodes = sum(d.state == "done" for d in dumps), {task.node for d in dumps for task in d.running}
    speed = f"{tokens:,}", _rate(now), _rate(tokens / seconds if seconds > 0 else 0.0), _duration(left)
    rows.append(("total", f"{done}/{len(dumps)} done", "", *speed, f"{len(nodes)} nodes", _left_out(dumps)))
    table = format_table(STATUS_COLUMNS, rows, width=terminal_width())
    counts = ((d.index, describe_step_counts((t.steps for t in d.finished), d.finished_tokens)) for d in dumps)
    steps = (f"dump {index} documents: {words}" for index, words in counts if words)
    words = f"{density:.3f} tokens a byte of the files"
    return "\n".join([table, *steps, *([words] if density else []), *_failures(dumps)])


def all_dumps_done(dumps: Sequence[DumpStatus], *, now: float) -> bool | None:
    """True if all dumps are done, False if the others have failed; None while a dump is running or waiting."""
    if all(dump.state == "done" for dump in dumps):
        return True
    over = all(
        dump.state in ("done", "failed")
        or (dump.state == "stalled" and now - max(task.at for task in dump.silent) > GONE_SECONDS)
        for dump in dumps
    )
    return False if over else None


def watch_status(metadata_folder: str | os.PathLike[str], seconds: float) -> bool:
    """Print the table every `seconds`, on a terminal in place, until no dump is left to wait for. Returns True if all
    dumps are done; the others have failed. Raises InputError."""
    lines = 0
    while True:
        dumps = read_status(metadata_folder)
        text = f"{time.strftime('%F %T')}\n{status_table(dumps)}"
        if sys.stdout.isatty():
            lines = show_in_place(text, lines)
        else:
            print(text, flush=True)
        if (done := all_dumps_done(dumps, now=time.time())) is not None:
            return done
        time.sleep(seconds)


def _failures(dumps: Iterable[DumpStatus]) -> Iterable[str]:
    for dump in dumps:
        if dump.error is not None:
            yield f"dump {dump.index} failed: {dump.error}"
        if dump.state == "stalled":
            since = time.strftime("%F %T", time.localtime(max(task.at for task in dump.silent)))
            yield (
                f"dump {dump.index}: no word from {dump.nodes} since {since}; was its job killed? "
                "Submit again: what is done is kept"
            )
        yield from (f"dump {dump.index} left out: {file.error}" for task in dump.finished for file in task.skipped)
        if bad := dump.counts("bad_lines"):
            examples = "; ".join([each for task in dump.finished for each in task.bad_line_examples][:MAX_EXAMPLES])
            yield f"dump {dump.index} left out: {describe_bad_lines(bad)}, for example {examples}"
        if losses := dump.counts("losses"):
            from relayrun.tokens.tokenize.encode.losses import describe_losses  # on demand: tokenizers

            if (lost := describe_losses(losses, dump.finished_tokens)) is not None:
                yield f"dump {dump.index}: {lost}"


def _left_out(dumps: Iterable[DumpStatus]) -> str:
    files = sum(len(task.skipped) for dump in dumps for task in dump.finished)
    lines = sum(dump.counts("bad_lines").total() for dump in dumps)
    return f"{files} files" + (f", {lines:,} lines" if lines else "")


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second / 1e6:.2f}" if tokens_per_second else "-"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if minutes else "< 1 min"


def _read_dump(metadata: DumpsFolder, index: int, now: float, *, done: bool, size: int) -> DumpStatus:
    output = metadata.tokenized_link / f"dump-{index}"
    shards, parts = _read_record(output)
    tasks = [] if done else [task for task in read_progress(output) if task.shard not in shards]
    running = tuple(task for task in tasks if now - task.at < STALE_SECONDS)
    silent = tuple(task for task in tasks if now - task.at >= STALE_SECONDS)
    error = None
    with contextlib.suppress(FileNotFoundError):
        error = (output / ERROR_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if done:
        state, error = "done", None
    elif running:
        state = "running"
    elif error is not None:
        state = "failed"
    else:
        state = "stalled" if silent else "open" if shards else "waiting"
    return DumpStatus(
        index=index,
        state=state,
        finished=tuple(shards.values()),
        of=len(parts),
        bytes=size,
        running=running,
        silent=silent,
        error=error,
    )


def dedup_status(metadata_folder: str | os.PathLike[str]) -> list[str]:
    """Return a line for each stage of `relayrun dumps dedup`, and one for an error; none without a deduplication."""
    work = DumpsFolder(metadata_folder).dedup_link / DEDUP_WORK
    found, size = list[str](), 0
    with contextlib.suppress(OSError, ValueError):
        counts: dict[str, list[dict[str, Any]]] = {}
        for file in sorted((work / "records").iterdir()):
            if file.suffix == ".json":
                counts.setdefault(file.name.rpartition("-")[0], []).append(read_json(file))
        stages = read_json(work / "settings.json")["stages"]
        for stage, number in stages.items():
            records = counts.get(stage, [])
            steps = describe_step_counts(record.get("steps", []) for record in records)
            left = sum(len(record.get("skipped", ())) for record in records)
            words = f"dedup {stage}: {len(records)}/{number} tasks" + (f"; documents: {steps}" if steps else "")
            found.append(words + (f"; left out: {left:,} files" if left else ""))
            size += sum(record.get("bytes", 0) for record in records if stage not in ("kept", "merged"))
        if all(len(counts.get(stage, ())) == number for stage, number in stages.items()):
            found.append(f"dedup is done; files between its stages: {size / 1e9:,.3f} GB in {os.path.realpath(work)}")
        with contextlib.suppress(OSError):
            found.append(f"dedup failed: {Path(work, ERROR_FILE).read_text(encoding='utf-8').strip()}")
    return found


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def count_finished_shards(output: Path) -> int:
    return len(_read_record(output)[0])


def _read_record(output: Path) -> tuple[dict[str, TaskRecord], dict[str, list[str]]]:
    """Return the finished tasks, and the files of all shards; empty without a record."""
    try:
        record = FolderRecord.read(output)
    except FileNotFoundError:
        return {}, {}
    return record.tasks, record.parts
