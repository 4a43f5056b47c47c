"""A process beside a rank that reads and tokenizes its streams ahead, without the rank's interpreter lock.

    rank                                          worker: python -m relayrun.tokens.mixture.stream_worker
    ReplicaSampleReader over `_ReceivedLanes`     ◄─pipe─  ReplicaSampleReader over `_SentLanes`

Schedule and position determine the order of lanes, so both sides take the same order and the rank sends no requests:
the worker sends each sample with the cursor of its lane, and blocks on a full pipe. The rank keeps the cursors of
samples it has taken; checkpoints exclude samples read ahead. Samples and state equal those of a rank that reads by
itself.

The rank writes a line of JSON to the worker's standard input and keeps it open: its end ends the worker, however the
rank died. Nothing is unpickled. A dead worker raises an error with its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from relayrun import errors
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import RelayrunError, log_to_stderr
from relayrun.masking import describe_secret
from relayrun.tokens.mixture.build_datasets import text_stream
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.order.sampler import (
    Cursor,
    LaneOpener,
    MixtureSampler,
    ReplicaSampleReader,
    Stream,
    read_lane_positions,
)
from relayrun.tokens.order.schedule import Schedule
from relayrun.tokens.shards.manifest import Manifest

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
"""Wanted size of the pipe; 1 MiB holds about 30 samples of 4,096 tokens. The kernel may give less."""
PIECE_BYTES = 1 << 17
"""Bytes of samples that are sent together, since each piece wakes the rank."""
PIECE_SECONDS = 0.002
"""Seconds after which a piece is sent at once, because the rank may wait for it."""
_FORGET_EVERY = 256
"""Samples between two calls that drop the cursors of sent samples."""
END_SECONDS = 10.0
_HEAD = struct.Struct("<II")
"""Head of a piece: bytes of the numbers of its samples, and of their tokens and masks, which follow. An error has 0 and
the bytes of its JSON."""
_RANK_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Signals with a meaning for the rank. Slurm sends them to all processes of the job; the worker must ignore them."""


def _environment(*, remote: bool) -> dict[str, str]:
    """Return the worker's environment, without secrets: the engine of a tokenizer is a package of somebody else.
    `remote`: files below URLs need their credentials."""
    found = {name: value for name, value in os.environ.items() if remote or not describe_secret(value, variable=name)}
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class StreamWorkerDied(RelayrunError):
    """The process that reads a rank's streams ended. It may have been killed, so the next attempt may succeed."""


class RankStreamWorker:
    """The rank's end: a process that reads this rank's share of streams."""

    def __init__(
        self, config: RunConfig, manifest: Path, order: MixtureSampler, *, consumed: int, replica: int, replicas: int
    ) -> None:
        """Start the process; `order` stands at sample `consumed`."""
        job: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "manifest": str(manifest),
            "phases": order.schedule.to_json(),
            "positions": {name: order.lane_positions[name].to_json(consumed, {}) for name in order.streams},
            "consumed": consumed,
            "replica": replica,
            "replicas": replicas,
        }
        receiving, sending = os.pipe()
        with contextlib.suppress(OSError):  # beyond a user's limit the default size stays
            fcntl.fcntl(sending, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)  # a child begins with its parent's mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "relayrun.tokens.mixture.stream_worker", str(sending)],
                stdin=subprocess.PIPE,
                pass_fds=[sending],
                env=_environment(remote="://" in json.dumps(job["config"]["data"])),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(sending)
        self._pipe: BinaryIO = os.fdopen(receiving, "rb")
        self._samples: deque[tuple[int, int, SampleRow, Cursor]] = deque()
        """Samples of the latest piece that were not taken yet: stream, lane, sample, and the cursor behind it."""
        self._error: RelayrunError | None = None
        """The error behind the last sample."""
        self._closing = False
        self._names = list(order.streams)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    @property
    def pid(self) -> int:
        return self._process.pid

    def openers(self) -> dict[str, LaneOpener]:
        """Return substitutes of `Stream.open_lanes` by stream; the worker opens the lanes."""
        return {name: partial(_ReceivedLanes, self, name) for name in self._names}

    def take(self, name: str, lane: int) -> tuple[SampleRow, Cursor]:
        """Return the next sample, of this lane, and the lane's cursor behind it. Raises the worker's errors."""
        if not self._samples:
            self._samples.extend(self._next_piece())
        of, number, row, cursor = self._samples.popleft()
        if (self._names[of], number) != (name, lane):
            raise RuntimeError(f"the worker read lane {number} of {self._names[of]}, not {lane} of {name}")
        return row, cursor

    def _next_piece(self) -> Iterator[tuple[int, int, SampleRow, Cursor]]:
        if self._error is not None:
            raise self._error
        head = self._pipe.read(_HEAD.size)
        sizes = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
        numbers, data = self._pipe.read(sizes[0]), self._pipe.read(sizes[1])
        if not sizes[1] or (len(numbers), len(data)) != sizes:
            self._died()
        if not numbers:
            entry = json.loads(data)
            kinds = (getattr(errors, each, None) for each in entry["error"])
            kind = next(each for each in kinds if isinstance(each, type) and issubclass(each, RelayrunError))
            self._error = kind(entry["message"], where=entry["where"], hint=entry["hint"])
            raise self._error
        return _unpacked(numbers, data)

    def close(self) -> None:
        """End the worker."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # hangs in the file system and dies once that returns
            log.warning("the process %d that reads streams does not end; it was killed", self.pid)
            return
        self._pipe.close()

    def _died(self) -> NoReturn:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its pipe" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise StreamWorkerDied(
            f"the process that reads this rank's streams (pid {self.pid}) {how}",
            hint="SIGKILL: look for a lack of memory on the node; else its words stand in the rank's log. "
            "data.num_workers=0 reads in the rank itself",
        )


class _ReceivedLanes:
    """Lanes that another process reads."""

    def __init__(self, worker: RankStreamWorker, name: str, cursors: Mapping[int, Cursor]) -> None:
        self._worker, self._name, self._cursors = worker, name, dict(cursors)

    def take(self, lane: int) -> SampleRow:
        row, self._cursors[lane] = self._worker.take(self._name, lane)
        return row

    def cursor(self, lane: int) -> Cursor:
        return self._cursors[lane]

    def close(self) -> None:
        self._worker.close()


class _Sender:
    """The worker's end of the pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._numbers: list[int] = []
        self._data: list[npt.NDArray[Any]] = []
        self._size, self._sent = 0, 0.0

    def send(self, of: int, lane: int, row: SampleRow, cursor: Cursor) -> None:
        """Send a sample, possibly together with later ones. Raises BrokenPipeError after the end of the rank."""
        masked, lengths = row.loss_mask is not None, row.lengths
        self._numbers += (of, lane, len(row.tokens), masked, row.padding, row.windows, len(cursor), *cursor)
        self._numbers += (-1,) if lengths is None else (len(lengths), *lengths)
        self._data.append(row.tokens.astype(np.int32, copy=False))
        self._size += self._data[-1].nbytes
        if row.loss_mask is not None:
            self._data.append(row.loss_mask.astype(np.float32, copy=False))
            self._size += self._data[-1].nbytes
        if self._size >= PIECE_BYTES or time.monotonic() - self._sent >= PIECE_SECONDS:
            self._send_samples()

    def send_error(self, error: RelayrunError) -> None:
        """Send the waiting samples, and an error behind them."""
        if self._data:
            self._send_samples()
        kinds = [kind.__name__ for kind in type(error).__mro__]
        told = {"error": kinds, "message": error.message, "where": error.where, "hint": error.hint}
        self._send_piece(b"", [np.frombuffer(json.dumps(told).encode(), np.uint8)])

    def _send_samples(self) -> None:
        self._send_piece(struct.pack(f"<{len(self._numbers)}q", *self._numbers), self._data)
        self._numbers, self._data, self._size = [], [], 0

    def _send_piece(self, numbers: bytes, data: Sequence[npt.NDArray[Any]]) -> None:
        head = _HEAD.pack(len(numbers), sum(each.nbytes for each in data))
        piece = memoryview(b"".join([head, numbers, *(each.data for each in data)]))
        while piece:
            piece = piece[os.write(self._pipe, piece) :]
        self._sent = time.monotonic()


class _SentLanes:
    """Lanes that send their samples as they are taken."""

    def __init__(self, sender: _Sender, number: int, stream: Stream, cursors: Mapping[int, Cursor]) -> None:
        """`number`: index among the streams of the job."""
        self._sender, self._number, self._lanes = sender, number, stream.open_lanes(cursors)

    def take(self, lane: int) -> SampleRow:
        row = self._lanes.take(lane)
        self._sender.send(self._number, lane, row, self._lanes.cursor(lane))
        return row

    def cursor(self, lane: int) -> Cursor:
        return self._lanes.cursor(lane)

    def close(self) -> None:
        self._lanes.close()


def _unpacked(numbers: bytes, data: bytes) -> Iterator[tuple[int, int, SampleRow, Cursor]]:
    """Yield the samples of a piece, each with stream, lane, and the cursor behind it; see `_Sender.send`."""
    all_numbers = struct.unpack(f"<{len(numbers) // 8}q", numbers)
    at = place = 0
    while at < len(all_numbers):
        of, lane, tokens, masked, padding, windows, size = all_numbers[at : at + 7]
        behind = at + 7 + size
        cursor, count = all_numbers[at + 7 : behind], all_numbers[behind]
        at = behind + 1 + max(0, count)
        ids = np.frombuffer(data, np.int32, tokens, place)
        place += ids.nbytes
        mask = None
        if masked:
            mask = np.frombuffer(data, np.float32, tokens - 1, place)
            place += mask.nbytes
        lengths = None if count < 0 else list(all_numbers[behind + 1 : at])
        yield of, lane, SampleRow(tokens=ids, lengths=lengths, loss_mask=mask, padding=padding, windows=windows), cursor


def send_samples(job: Mapping[str, Any], sender: _Sender) -> None:
    """Send the samples of a rank's streams, in its order. Raises BrokenPipeError after the end of the rank."""
    config = RunConfig.model_validate(job["config"])
    manifest = Manifest.read(job["manifest"])
    schedule = Schedule.from_json(job["phases"])
    names = {config.data.sources[name].identity(name): name for name in config.data.streams}
    openers = {}
    for number, identity in enumerate(job["positions"]):
        stream = text_stream(config, manifest, names[identity], manifest.datasets[identity])
        openers[identity] = partial(_SentLanes, sender, number, stream)
    reading = ReplicaSampleReader(
        schedule,
        openers,
        read_lane_positions(job["positions"], job["consumed"]),
        lambda _: SampleRow(tokens=np.zeros(0, np.int64)),  # the rank reads samples of other data sets itself
        name="train",
        lanes=config.data.lanes,
        consumed=job["consumed"],
        replica=job["replica"],
        replicas=job["replicas"],
    )
    gc.freeze()  # excludes long-lived objects from garbage collection
    for turn, k in enumerate(reading.numbers(job["consumed"], 1 << 62)):
        reading.row(k)
        if not turn % _FORGET_EVERY:
            reading.cursors(k)


def run_worker() -> None:
    """Read the job, then send samples until the rank ends."""
    log_to_stderr()
    sender = _Sender(int(sys.argv[1]))
    job = json.loads(sys.stdin.buffer.readline() or b"{}")
    threading.Thread(target=_end_with_the_rank, daemon=True, name="rank").start()
    try:
        send_samples(job, sender)
    except RelayrunError as error:
        sender.send_error(error)
    except BrokenPipeError:
        os._exit(0)


def _end_with_the_rank() -> None:
    os.read(0, 1)  # not through sys.stdin, whose lock the interpreter takes at exit
    os._exit(0)


if __name__ == "__main__":
    run_worker()
