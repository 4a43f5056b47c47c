"""A test file is collected by itself, whatever its first import warns of."""

from __future__ import annotations

import pytest

from tests import collect_alone

FIRST_IMPORTS = ("test_file_limit.py", "test_verify_checkpoint.py")
"""Files that import torch and megatron-core; `python -m tests.collect_alone` looks at all files."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST_IMPORTS[0], pytest.param(FIRST_IMPORTS[1], marks=pytest.mark.long)])
def test_a_file_that_imports_torch_first_is_collected(name: str) -> None:
    (path,) = collect_alone.HERE.rglob(name)
    done = collect_alone.in_own_process([path])
    assert done.returncode == 0, done.stdout
    assert "1 of 1 test files are collected alone" in done.stdout
