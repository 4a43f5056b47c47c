"""How much is tested: collected tests of each folder, assertions, and expected exceptions."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .masks import ROOT, write_json

OWN = "tests/behaviour"
"""The recorder's own tests, which are not counted."""


def folder_of(name: str) -> str:
    """Return the folder of a test file, `tests/control` for example."""
    return "/".join(Path(name).parts[:2]) if name.count("/") > 1 else "tests"


def collected() -> dict[str, int]:
    """Return how many tests pytest collects from each folder."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", f"--ignore={OWN}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"pytest --collect-only: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    return of_each_folder(done.stdout)


def of_each_folder(listed: str) -> dict[str, int]:
    """Return how many tests of each folder pytest has listed."""
    return dict(Counter(folder_of(name) for name in re.findall(r"^(tests/\S+?)::", listed, re.M)))


def statements(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the folder of each `assert` and of each `pytest.raises` of the tests, with the word."""
    for path in sorted((root / "tests").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(f"{OWN}/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                yield folder_of(name), "assert"
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.raises":
                yield folder_of(name), "pytest.raises"


def written(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return how many assertions and expected exceptions the tests of each folder have."""
    found: dict[str, dict[str, int]] = {}
    for (folder, word), number in sorted(Counter(statements(root)).items()):
        found.setdefault(folder, {})[word] = number
        of_all = found.setdefault("all", {})
        of_all[word] = of_all.get(word, 0) + number
    return found


def record(folder: Path) -> None:
    """Write the counts."""
    tests = collected()
    write_json(folder / "collected.json", {**tests, "all": sum(tests.values())})
    write_json(folder / "written.json", written())
