"""Records that are read as far as somebody asks, and once, however many ask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadOnce(Generic[T]):
    """The items of an iterator, to be gone through any number of times, also while another goes through them."""

    def __init__(self, items: Iterable[T]) -> None:
        self._read: list[T] = []
        self._rest = iter(items)

    def __iter__(self) -> Iterator[T]:
        number = 0
        while True:
            if number == len(self._read):
                found = next(self._rest, None)
                if found is None:
                    return
                self._read.append(found)
            yield self._read[number]
            number += 1
