"""One process at a time: `flock` on a file that is never replaced. The kernel lets go when the holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

_held_locks: set[int] = set()


def _close_locks_in_child() -> None:
    for fd in _held_locks:
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(
    after_in_child=_close_locks_in_child
)  # a worker that outlives its parent by a moment must not keep the lock

_NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str], *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold the lock on `path` (made if missing), alone or with other `shared` holders.

    Yields False if `wait` is False and somebody else holds it.

    On a file system without locks (some Lustre mounts) it yields True: our appends are single writes,
    and the other guards (job ids, records) hold there too.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held_locks.add(fd)
    try:
        held = True
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
        yield held
    finally:
        _held_locks.discard(fd)
        os.close(fd)
