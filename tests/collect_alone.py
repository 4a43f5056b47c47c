"""Collect each test file by itself: `python -m tests.collect_alone [FILE ...]`; exit status 1 if one cannot be.

In the whole suite an earlier file may have imported a package whose first import warns. Each file gets a process that
is forked from one that has imported pytest.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
OPTIONS = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", "-n0"]


def is_collected(path: Path) -> bool:
    """Return whether pytest collects this file alone; print its output if not."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = pytest.main([*OPTIONS, str(path)])
            if code:
                print(said.getvalue()[-2000:], flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_own_process(files: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    """Run this program in a process that has imported nothing."""
    command = [sys.executable, "-m", "tests.collect_alone", *map(str, files)]
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False, timeout=600)


def main(files: Sequence[str]) -> int:
    """Collect the given files, or all; return 1 if one fails."""
    chosen = [Path(name) for name in files] or sorted(HERE.rglob("test_*.py"))
    failed = [path for path in chosen if not is_collected(path)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} test files are collected alone", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
