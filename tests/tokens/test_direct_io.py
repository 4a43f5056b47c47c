"""Files that pass by the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from relayrun.tokens.stores import direct_io
from relayrun.tokens.stores.direct_io import ALIGNMENT, DirectFile

BLOCK = 4 * ALIGNMENT
DIRECT = os.O_DIRECT


@pytest.fixture(params=["direct", "refused when opened", "refused when written"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, on file systems of three kinds."""
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", BLOCK)
    really_open, really_write = os.open, os.pwrite

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & DIRECT and request.param == "refused when opened":
            raise OSError(errno.EINVAL, "no direct writes here")
        return really_open(path, flags, mode)

    def pwrite(fd: int, data: memoryview, place: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT:
            assert place % ALIGNMENT == 0 == len(data) % ALIGNMENT
            if request.param == "refused when written":
                raise OSError(errno.EINVAL, "no direct writes here")
        return really_write(fd, data, place)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(20))
def test_every_byte_arrives_whatever_the_pieces(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    expected = bytearray()
    with DirectFile(tmp_path / "file") as file:
        for _ in range(generator.randrange(1, 40)):
            match generator.randrange(7):
                case 3:
                    size = generator.randrange(BLOCK - ALIGNMENT + 1)
                    room = file.reserve(size)
                    assert room.shape == (size,)
                    room[:] = 7
                    if generator.random() < 0.7:  # else something went wrong meanwhile
                        file.commit(size)
                        expected += bytes([7]) * size
                case 0:
                    size = generator.randrange(len(expected) + 1)
                    assert file.truncate(size) == size
                    del expected[size:]
                case 1:
                    os.fsync(file.fileno())
                    assert (tmp_path / "file").read_bytes() == expected
                case 2:
                    numbers = np.arange(generator.randrange(3 * ALIGNMENT), dtype=np.int32)
                    assert file.write(numbers.data) == numbers.nbytes
                    expected += numbers.tobytes()
                case _:
                    piece = generator.randbytes(generator.choice((0, 1, 64, ALIGNMENT, BLOCK, 3 * BLOCK + 7)))
                    assert file.write(piece) == len(piece)
                    expected += piece
            assert file.tell() == len(expected)
    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.alone
def test_little_stays_in_the_page_cache(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(1 << 20))
    with plain.open("rb") as other:
        os.fsync(other.fileno())
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(plain):
        pytest.skip("this file system lives in memory")
    with DirectFile(tmp_path / "file") as file:
        file.write(np.ones(40 << 20, np.uint8))
        os.fsync(file.fileno())
    assert resident(tmp_path / "file") <= mmap.PAGESIZE


@pytest.mark.slow
def test_what_is_cut_off_is_not_what_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", BLOCK)
    really_write, really_cut = os.pwrite, os.ftruncate

    def slowly(fd: int, data: memoryview, place: int) -> int:
        time.sleep(0.02)
        return really_write(fd, data, place)

    def behind_the_write(fd: int, size: int) -> None:  # as the kernel does it
        time.sleep(0.05)
        really_cut(fd, size)

    monkeypatch.setattr(os, "pwrite", slowly)
    monkeypatch.setattr(os, "ftruncate", behind_the_write)
    for size in (BLOCK, BLOCK + 5, BLOCK - 5, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 5):
        data = random.Random(size).randbytes(3 * BLOCK + 100)
        with DirectFile(tmp_path / "file") as file:
            file.write(data)
            file.truncate(size)
            file.write(b"more")
        assert (tmp_path / "file").read_bytes() == data[:size] + b"more"


def test_a_cut_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", BLOCK)
    data = random.Random(0).randbytes(2 * BLOCK + 100)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", lambda *_: b"")
            with pytest.raises(OSError, match="0 bytes at"):
                file.truncate(BLOCK + 7)
        assert file.tell() == len(data)
    assert (tmp_path / "file").read_bytes() == data


def test_tensor_by_tensor_every_byte_is_written_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    really = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: written.append(len(data)) or really(fd, data, place))
    with DirectFile(tmp_path / "file") as file:
        for number in range(300):
            torch.save(torch.full((5000,), number), file)
            file.flush()  # as torch's checkpoint writer does
        size = file.tell()
        os.fsync(file.fileno())
    assert (tmp_path / "file").stat().st_size == size
    assert size <= sum(written) < size + ALIGNMENT


@pytest.mark.usefixtures("small")
def test_an_error_behind_is_raised_by_every_later_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, place: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", full)
    file.write(bytes(BLOCK))
    for action in (file.fileno, lambda: file.write(bytes(BLOCK)), file.close):
        with pytest.raises(OSError, match="No space"):
            action()
    assert file.closed
    file.close()
    for action in (file.fileno, lambda: file.write(b"x")):
        with pytest.raises(ValueError, match="closed"):
            action()


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "none" / "file")


def resident(path: Path) -> int:
    """Bytes of a file in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file:
        place = libc.mmap(None, size, 1, 1, file.fileno(), 0)
    found = (ctypes.c_ubyte * pages)()
    assert libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), found) == 0
    libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))
    return mmap.PAGESIZE * sum(each & 1 for each in found)
