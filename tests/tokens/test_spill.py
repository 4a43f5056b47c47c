"""Texts that are too long for memory."""

from __future__ import annotations

import errno
import gc
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.errors import RelayrunError
from relayrun.tokens.readers import texts
from relayrun.tokens.readers.texts import LongText, PackedTexts, release_pages


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_BYTES_IN_MEMORY", 1000)


@pytest.mark.parametrize("pieces", [[], [b"short"], [b"a" * 600, b"b" * 600, b"c"], [b"d" * 5000, b"", b"e" * 9000]])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_text_is_its_pieces(pieces: list[bytes], in_memory: bool, tmp_path: Path) -> None:
    text = LongText(None if in_memory else str(tmp_path))
    for piece in pieces:
        text.add(piece)
    array = text.text()
    array.validate(full=True)
    assert array.to_pylist() == [b"".join(pieces).decode()]
    assert list(tmp_path.iterdir()) == []  # the file has no name


def resident_of_files() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssFile"].split()[0])


@pytest.mark.alone
def test_what_is_read_leaves_memory_and_can_be_read_again(tmp_path: Path) -> None:
    size = 64 << 20
    text = LongText(str(tmp_path))
    for _ in range(64):
        text.add(b"x" * (1 << 20))
    data = PackedTexts.from_arrow(text.text()).used
    del text
    before = resident_of_files()
    assert int(data.sum(dtype=np.int64)) == size * ord("x")
    assert resident_of_files() - before > size * 0.9
    release_pages(data[1000 : size // 2])
    assert resident_of_files() - before < size * 0.6
    assert int(data.sum(dtype=np.int64)) == size * ord("x")
    for begin in range(0, size, 1 << 20):
        piece = data[begin : begin + (1 << 20)]
        assert int(piece.sum(dtype=np.int64)) == len(piece) * ord("x")
        release_pages(piece)
    assert resident_of_files() - before < 8 << 20
    release_pages(np.ones(5000, np.uint8))  # of no file: stays as it is


@pytest.mark.slow
def test_the_disk_space_is_free_when_the_text_is_gone(tmp_path: Path) -> None:
    text = LongText(str(tmp_path))
    text.add(b"x" * 5000)
    array = text.text()
    del text
    gc.collect()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del array
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_full_disk_is_not_laid_on_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(RelayrunError, match="no room for a long text: No space left on device"):
        LongText(str(tmp_path)).add(b"x" * 5000)
    monkeypatch.undo()
    monkeypatch.setattr(texts, "MAX_BYTES_IN_MEMORY", 1000)
    text = LongText(str(tmp_path))
    text.add(b"x" * 5000)
    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(RelayrunError, match="no room for a long text"):
        text.text()
