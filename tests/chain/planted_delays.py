"""`sitecustomize` of a rank that sleeps, once each, where a slow file system or a slow installation would.

    PLANTED_DELAYS=import=40,read=40,save=40     seconds; PLANTED_FOLDER: where a file says that one has happened

Python imports this module by itself before any program; relayrun knows nothing of it. Imports are slow on every rank:
one that waits for rank 0 tries to connect to it at longer and longer intervals, which takes longer than the delay.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def plant(rank: str) -> None:
    delays = dict(pair.split("=") for pair in os.environ["PLANTED_DELAYS"].split(","))
    if rank != "0":
        delays = {name: seconds for name, seconds in delays.items() if name == "import"}
    folder = Path(os.environ["PLANTED_FOLDER"])

    def once(name: str) -> None:
        try:
            (folder / (name if rank == "0" else f"{name}-{rank}")).touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(float(delays[name]))

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0] == "megatron.core" and "import" in delays:
            once("import")
        if event == "open" and "save" in delays and str(arguments[0]).endswith(".distcp"):
            once("save")

    sys.addaudithook(look)
    if "read" in delays:
        os.preadv = slow_reads(os.preadv, once)
        os.pread = slow_reads(os.pread, once)


def slow_reads(real: Callable[..., Any], once: Callable[[str], None]) -> Callable[..., Any]:
    """A read of a file of tokens that sleeps, the thirtieth of this process: training is under way."""
    count = 0

    def read(descriptor: int, *arguments: Any) -> Any:
        nonlocal count
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".bin"):
            count += 1
            if count == 30:
                once("read")
        return real(descriptor, *arguments)

    return read


if "PLANTED_DELAYS" in os.environ and "RANK" in os.environ:
    plant(os.environ["RANK"])
