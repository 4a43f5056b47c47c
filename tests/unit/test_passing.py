"""Files that pass through the page cache."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from relayrun import passing
from relayrun.passing import PassingFile


def test_a_file_on_its_way_is_forgotten_window_by_window_and_holds_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "WINDOW", 1000)
    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, __: forgotten.append((begin, begin + size)))
    pieces = [random.Random(size).randbytes(size) for size in (0, 1, 999, 3, 12_345, 1000, 500)]
    with PassingFile(tmp_path / "file") as file:
        for piece in pieces:
            assert file.write(np.frombuffer(piece, np.uint8)) == len(piece)
        assert file.write(np.zeros(0, np.int32)) == 0
        assert file.tell() == sum(map(len, pieces))
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert forgotten[-1][1] == sum(map(len, pieces))
    twice = Counter(place for begin, end in forgotten for place in range(begin, end))
    assert set(twice) == set(range(forgotten[-1][1]))  # all of it, the first time to be written, then to be dropped
    assert all(count == 2 for place, count in twice.items() if place < forgotten[-1][0])
    assert max(end - begin for begin, end in forgotten) < 4 * 1000


def test_what_was_cut_off_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "WINDOW", 1000)
    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, __: forgotten.append((begin, begin + size)))
    with PassingFile(tmp_path / "file") as file:
        file.write(b"a" * 5000)
        file.truncate(1500)
        file.seek(1500)
        file.write(b"b" * 3000)
    assert (tmp_path / "file").read_bytes() == b"a" * 1500 + b"b" * 3000
    assert all(0 <= begin < end for begin, end in forgotten)
    assert forgotten[-1][1] == 4500
