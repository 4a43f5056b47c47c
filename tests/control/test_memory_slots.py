"""Slots in memory: whole or not at all, with room that is there before they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from relayrun.control.agent import memory_copies
from relayrun.control.agent.memory_copies import (
    HEADER_BYTES,
    MemorySlot,
    NodeMemoryCopy,
    NodeMemoryFullError,
    newest_complete_copy,
    read_copies,
)
from relayrun.leftovers import remove_leftovers


def write(slot: MemorySlot, iteration: int, body: bytes) -> None:
    view = slot.reserve(len(body))
    slot.void()
    view[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    slot.commit(iteration=iteration, size=len(body), hash="h")


def iterations(folder: Path, rank: int) -> list[int]:
    return [copy.iteration for copy in read_copies(folder) if copy.rank == rank and not copy.kept]


def test_a_slot_counts_from_its_header_on(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir(mode=0o700)
    assert iterations(folder, 3) == []
    one, other = MemorySlot(folder, 3, 0), MemorySlot(folder, 3, 1)
    write(one, 46, b"a" * 5000)
    write(other, 47, b"b" * 5000)
    assert sorted(iterations(folder, 3)) == [46, 47]
    assert iterations(folder, 2) == []
    view = one.reserve(5000)
    one.void()
    view[HEADER_BYTES : HEADER_BYTES + 2500] = b"c" * 2500  # and then its rank was killed
    assert iterations(folder, 3) == [47]
    again = MemorySlot(folder, 3, 1)  # as the rank of the next restart finds it
    assert again.header() == {"iteration": 47, "size": 5000, "hash": "h"}
    assert bytes(again.open()[HEADER_BYTES : HEADER_BYTES + 5000]) == b"b" * 5000
    again.void()
    assert iterations(folder, 3) == []


def test_the_folder_is_of_this_user_alone_and_nobody_makes_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copies, "SHARED_MEMORY", tmp_path)
    folder = memory_copies.make_memory_folder()
    write(MemorySlot(folder, 0, 0), 1, b"a")
    assert (folder.stat().st_mode & 0o777, MemorySlot(folder, 0, 0).path.stat().st_mode & 0o777) == (0o700, 0o600)
    with pytest.raises(FileExistsError):
        memory_copies.make_memory_folder()
    assert remove_leftovers(tmp_path, shared=True) == []  # its owner lives


def test_a_larger_state_takes_a_larger_slot(tmp_path: Path) -> None:
    slot = MemorySlot(tmp_path, 0, 0)
    write(slot, 1, b"a" * 100)
    write(slot, 2, b"b" * 100_000)
    assert iterations(tmp_path, 0) == [2]
    assert slot.path.stat().st_size == HEADER_BYTES + 100_000


def test_a_node_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _start: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory_copies.os, "posix_fallocate", full)
    monkeypatch.setattr(memory_copies, "free_space", lambda _path: 1_000_000)
    with pytest.raises(NodeMemoryFullError) as refused:
        MemorySlot(tmp_path, 0, 0).reserve(5_000_000)
    assert "takes 5,000,000 bytes, and 1,000,000 are free" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_is_none_counts_as_no_copy(tmp_path: Path) -> None:
    slot = MemorySlot(tmp_path, 0, 0)
    for text in (b"", b"\0" * 5000, b"[1]\n", b'{"iteration": \n'):
        slot.path.write_bytes(text)
        assert slot.header() is None


def test_copies_that_are_kept_for_another_node_have_names_of_their_own(tmp_path: Path) -> None:
    write(MemorySlot(tmp_path, 3, 0), 46, b"a")
    write(MemorySlot(tmp_path, 3, 1, kept=True), 47, b"b")
    (tmp_path / "other-0003.0").write_bytes(b"")
    assert read_copies(tmp_path) == [NodeMemoryCopy(3, 47, "h", True), NodeMemoryCopy(3, 46, "h", False)]


def test_an_iteration_counts_where_every_rank_has_a_copy_and_all_agree_on_its_hash() -> None:
    def of(rank: int, iteration: int, digest: str = "", *, kept: bool = False) -> NodeMemoryCopy:
        return NodeMemoryCopy(rank, iteration, digest or f"{rank}.{iteration}", kept)

    own = [of(0, 46), of(0, 47), of(1, 46), of(1, 47)]
    assert newest_complete_copy(own, ranks=2, after=40) == (47, "memory")
    assert newest_complete_copy(own, ranks=2, after=47) is None
    assert newest_complete_copy(own, ranks=3, after=40) is None
    assert newest_complete_copy(own[:3], ranks=2, after=40) == (46, "memory")  # one has not copied 47 yet
    assert newest_complete_copy([*own[:2], of(1, 46, kept=True)], ranks=2, after=40) == (
        46,
        "neighbour",
    )
    assert newest_complete_copy([*own, of(1, 47, kept=True)], ranks=2, after=40) == (47, "memory")
    assert newest_complete_copy([*own, of(1, 47, "other", kept=True)], ranks=2, after=40) == (46, "memory")
    assert newest_complete_copy([], ranks=2, after=0) is None
