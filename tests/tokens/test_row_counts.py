"""Counts of rows that are kept in a folder: damage, ranks that open them together, and what is on the disk when."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from relayrun.tokens.order import document_packing
from relayrun.tokens.order.document_packing import KEPT_OPENINGS, RowCountCache
from relayrun.tokens.stores.direct_io import file_checksum

RIGHT = np.cumsum(np.arange(90), dtype=np.int64)


def read(folder: Path, opening: str | None = None) -> list[int]:
    def build() -> npt.NDArray[np.int64]:
        return RIGHT

    return [int(each) for each in RowCountCache(folder, "d", opening=opening).read_or_build(build)]


def test_what_is_there_serves_the_next_opening(tmp_path: Path) -> None:
    assert read(tmp_path) == RIGHT.tolist()
    file = tmp_path / "d-rows.npy"
    before = file.stat()
    assert read(tmp_path) == RIGHT.tolist()
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
def test_of_the_ranks_that_open_a_cache_together_one_compares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each with a lock of its own, as processes have. A damaged one is built once, and seen whole by all."""
    compared: list[int] = []
    compare = file_checksum

    def counted(path: Any) -> Any:
        compared.append(1)
        time.sleep(0.02)  # the others come meanwhile
        return compare(path)

    monkeypatch.setattr(document_packing, "file_checksum", counted)

    def open_by_four(opening: str | None) -> int:
        compared.clear()
        caplog.clear()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: read(tmp_path, opening), range(4))) == [RIGHT.tolist()] * 4
        return len(compared)

    assert open_by_four("built") == 0
    assert open_by_four("first") == 1
    assert open_by_four("first") == 0
    assert open_by_four(None) == 4, "who shares nothing with the others compares for itself"
    damaged, checked = tmp_path / "d-rows.npy", tmp_path / "d-checked.json"
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 8
    damaged.write_bytes(data)
    assert open_by_four("second") == 1
    assert caplog.text.count("the kept counts of rows are built anew") == 1
    damaged.write_bytes(data)
    assert open_by_four("second") == 1, "this is not the file that the first one found"
    assert caplog.text.count("the kept counts of rows are built anew") == 1
    damaged.unlink()
    assert open_by_four("third") == 0
    checked.write_text("[torn")
    assert open_by_four("third") == 1
    for number in range(KEPT_OPENINGS + 1):
        open_by_four(f"opening {number}")
    assert len(json.loads(checked.read_text())) == KEPT_OPENINGS


def test_a_damaged_cache_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bit anywhere in it, a torn or a missing file, and a record that does not fit."""
    read(tmp_path)
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert [path.name for path in files] == ["d-checksums.json", "d-rows.npy"]
    whole = {path: path.read_bytes() for path in files}
    generator = np.random.default_rng(2)

    def flipped(path: Path) -> None:
        data = bytearray(whole[path])
        data[generator.integers(len(data))] ^= 1 << generator.integers(8)
        path.write_bytes(data)

    harms: list[tuple[Path, Callable[[Path], Any]]] = [(path, flipped) for path in files for _ in range(5)]
    harms += [(path, lambda path: path.write_bytes(whole[path][:-7])) for path in files]
    harms += [(path, Path.unlink) for path in files]
    for path, harm in harms:
        harm(path)
        caplog.clear()
        assert read(tmp_path) == RIGHT.tolist(), (path, harm)
        assert {path: path.read_bytes() for path in files} == whole, "mended for the next"
        assert "the kept counts of rows" in caplog.text or harm is Path.unlink or path.suffix == ".json"


def test_what_a_cache_holds_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are synced before their rename, and the record that vouches for them comes last."""
    seen: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(fd: int) -> None:
        seen.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition("-")[0])
        sync(fd)

    def renamed(one: str, other: str) -> None:
        seen.append("rename " + Path(other).name.rpartition("-")[2])
        rename(one, other)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    read(tmp_path / "cache")
    assert seen == ["sync .tmp", "rename rows.npy", "sync .tmp", "rename checksums.json", "sync cache"]
