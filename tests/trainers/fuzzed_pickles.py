"""Reads mutated files in a process of its own, and compares the process with what it was. Standard library alone.

python fuzzed_pickles.py FOLDER SEED ROUNDS     FOLDER/metadata, FOLDER/common, and perhaps FOLDER/fault
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pathlib
import random
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relayrun.control.trainers import pickle_records, torch_files

_INSERTED = (
    b"cpathlib\nPosixPath\n",
    b"cargparse\nNamespace\n",
    b"cbuiltins\ngetattr\n",
    b"cos\nsystem\n",
    b"N}X\x04\x00\x00\x00_strX\x01\x00\x00\x00xs\x86b",
    b"}X\x03\x00\x00\x00twoK\x02sb",
    b")R",
    b")\x81",
    b"\x86",
    b"(",
    b"]",
    b"}",
    b"0",
    b"h\x00",
)
"""Pieces of a program: names, states, calls, containers."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with one to four changes: of a byte, a cut, a copied or an inserted piece; of an archive the pickle."""
    if data[:2] == b"PK" and rng.random() < 0.9:
        return _archive_with(data, lambda inner: mutated(inner, rng))
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(made)), rng.randint(1, 40)
        match rng.randrange(5):
            case 0:
                made[at] = rng.randrange(256)
            case 1:
                del made[at : at + length]
            case 2:
                made[at:at] = made[at : at + length] * rng.randint(1, 30)
            case 3:
                made[at:at] = rng.choice(_INSERTED)
            case _:
                made[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 255, 1 << 20, (1 << 31) - 1, (1 << 32) - 1)))
        made = made or bytearray(data)
    return bytes(made)


def _archive_with(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer := io.BytesIO(), "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return buffer.getvalue()


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Give this process `more` bytes of addresses beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def state() -> dict[str, Any]:
    """Modules of the process, and the attributes of all that files name, and of the reader."""
    classes = (argparse.Namespace, pathlib.PosixPath, collections.OrderedDict, set, getattr, io.BytesIO)
    own = [each for module in (pickle_records, torch_files) for each in vars(module).values() if callable(each)]
    found = {repr(each): {**getattr(each, "__dict__", {})} for each in (*classes, *own)}
    functions = {repr(each): getattr(each, "__defaults__", None) for each in own}
    return {"modules": {*sys.modules}, "classes": found, "functions": functions}


def planted(fault: str) -> None:
    """What a bad reader does."""
    if fault == "changes":
        argparse.Namespace.overwrite = True  # type: ignore[attr-defined]
    elif fault == "imports":
        sys.modules["imported"] = sys
    elif fault == "is slow":
        time.sleep(11)
    elif fault == "takes memory":
        bytearray(2 << 30)


def read(name: str, data: bytes) -> None:
    """Read a file as its readers do, and print all that may be printed."""
    if name == "metadata":
        records, _ = pickle_records.read_records(data)
        str(records)
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            [*torch_files.blocks_of(records)]
    else:
        str(torch_files.read_torch_file(data))


def refusal(name: str, data: bytes) -> str:
    """The words of a refusal; empty if the file was read."""
    try:
        read(name, data)
    except pickle_records.CorruptPickle as error:
        return str(error) or "refused"
    return ""


def main(folder: Path, seed: int, rounds: int) -> None:
    rng, files = random.Random(seed), {name: (folder / name).read_bytes() for name in ("metadata", "common")}
    fault = (folder / "fault").read_text() if (folder / "fault").exists() else ""
    for name, data in files.items():
        read(name, data)  # the first one imports codecs
    before, counts = state(), {True: 0, False: 0}
    for number in range(rounds):
        name = rng.choice([*files])
        data, began = mutated(files[name], rng), time.monotonic()
        try:
            with memory_limit(1 << 30):
                planted(fault)
                words = refusal(name, data)
        except MemoryError:
            raise AssertionError(f"takes memory: round {number}") from None
        assert len(words) < 1000, f"says too much: {words}"
        counts[not words] += 1
        assert time.monotonic() - began < 10, f"is slow: round {number}"
        if number % 50 == 0 or number == rounds - 1:
            now = state()
            assert now["modules"] == before["modules"], f"imports {now['modules'] - before['modules']}"
            assert now == before, f"changes the process: round {number}"
    print(counts[True], counts[False])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
