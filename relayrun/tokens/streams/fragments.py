"""The files of a stream in fragments, and their order in each epoch: a pure function of names, sizes and seed.

A fragment is a row group of a parquet file, or a whole file. Files are dealt to groups of lanes, which share them: each
file of an epoch belongs to one group, and no other group opens it. There are as many groups as leave each at least
`FILES_OF_A_GROUP` files, so that their shares differ little; where files are few, all lanes share all files. What is a
group does not depend on the number of ranks.

Footers are read when an epoch comes to their file, so that a run begins without looking at all of them; a shuffle over
all fragments (`fragment_shuffle_window: -1`) needs them all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.streams import StreamSection
from relayrun.errors import InputError
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.readers.formats import file_kind
from relayrun.tokens.readers.rows import open_parquet
from relayrun.tokens.shards.manifest import FileEntry
from relayrun.tokens.streams.faults import is_content_fault

MIN_FILES_PER_GROUP = 8
"""Files that each group of lanes has at least, where there is more than one group. Part of the order."""
_FOOTERS_READ_AT_ONCE = 16
"""Footers that are read together."""


@dataclass(frozen=True)
class Fragment:
    """A piece of a file that is read at once."""

    file: int
    """Number of the file in the manifest."""
    group: int | None
    """Its row group; None: the whole file."""
    rows: int | None = None
    """Only its first so many rows are read; None: all."""


def group_count(files: int, lanes: int) -> int:
    """Into how many groups so many lanes fall that read so many files: a divisor of `lanes`."""
    most = max(1, files // MIN_FILES_PER_GROUP)
    return max(groups for groups in range(1, min(lanes, most) + 1) if lanes % groups == 0)


class FragmentOrder:
    """The fragments of each epoch for each group of lanes."""

    def __init__(self, files: Sequence[FileEntry], stream: StreamSection, *, name: str, seed: int, groups: int) -> None:
        self.files = files
        self.groups = groups
        self._stream = stream
        self._name = name
        self._seed = seed
        self._fragments_of: dict[int, list[Fragment]] = {}
        self._all = lru_cache(1)(self._every_fragment)
        self._lock = threading.Lock()

    def of_epoch(self, epoch: int, group: int) -> Iterator[Fragment]:
        """The fragments of a group of lanes in their order. Raises InputError for a file that cannot be opened."""
        window = self._stream.fragment_shuffle_window
        if window == -1:
            yield from self._all_shuffled(epoch, group)
            return
        count = len(self.files)
        files = range(count) if window == 0 else self._permutation(count, "files", epoch)
        fragments = (fragment for file in self._share(files, group) for fragment in self._of_file(file))
        if window < 2:
            yield from fragments
            return
        chunk = 0
        while together := [*islice(fragments, window)]:
            order = self._permutation(len(together), f"{group}/{chunk}", epoch)
            yield from (together[i] for i in order)
            chunk += 1

    def _share(self, numbers: Sequence[int], group: int) -> Sequence[int]:
        """What belongs to a group, of all that an epoch deals."""
        if self._stream.files_circular_shift:
            count = len(numbers)
            return numbers[group * count // self.groups : (group + 1) * count // self.groups]
        return numbers[group :: self.groups]

    def _all_shuffled(self, epoch: int, group: int) -> Iterator[Fragment]:
        with self._lock:  # groups are read by threads of their own
            every = self._all()
        for number in self._share(self._permutation(len(every), "fragments", epoch), group):
            file, fragment = every[number].tolist()
            yield self._of_file(file)[fragment]

    def _every_fragment(self) -> npt.NDArray[np.int64]:
        """File and place in the file of all fragments, int64 [fragments, 2]."""
        with ThreadPoolExecutor(_FOOTERS_READ_AT_ONCE) as pool:
            counts = np.array([*map(len, pool.map(self._of_file, range(len(self.files))))])
        files = np.repeat(np.arange(len(counts)), counts)
        return np.stack([files, np.arange(len(files)) - np.repeat(np.cumsum(counts) - counts, counts)], axis=1)

    def _permutation(self, count: int, what: str, epoch: int) -> list[int]:
        """A shuffle of range(count); `what` and epoch choose which."""
        key = permutation_key(self._seed, f"{self._name}/{what}", epoch)
        found: list[int] = Permutation(count, key).map(np.arange(count)).tolist() if count else []
        return found

    def _of_file(self, number: int) -> list[Fragment]:
        """The fragments of a file, from its footer where it has one."""
        if number not in self._fragments_of:
            self._fragments_of[number] = self._look_at(number)
        return self._fragments_of[number]

    def _look_at(self, number: int) -> list[Fragment]:
        entry = self.files[number]
        if file_kind(entry.path) != "parquet" or not self._stream.split_to_row_groups:
            return [Fragment(number, None, entry.rows)]
        try:
            with open_parquet(entry.path) as file:
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        except InputError as error:
            if self._stream.on_error == "fail" or not is_content_fault(error):
                raise
            return [Fragment(number, None)]  # of which no row is read
        found, left = [], entry.rows
        for group, rows in enumerate(sizes[: entry.fragments]):
            if left is None:
                found.append(Fragment(number, group))
            elif left > 0:
                found.append(Fragment(number, group, left if left < rows else None))
                left -= rows
        return found
