"""Plants the faults of `faults` into copies of the tree, one at a time, and sees whether their tests fail.

Nothing is found by a path: a fault lies where its old text stands, and a test where its name is defined. So both are
found after a file has moved.
"""

from __future__ import annotations

import ast
import builtins
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from .faults import FAULTS, Fault
from .masks import ROOT, environment

COPIES = 2
"""Copies of the tree, each with one fault at a time."""

SECONDS = 300
"""How long the tests of a fault may take."""


class PlantError(Exception):
    """A fault cannot be planted, or its test cannot be found."""


@dataclass(frozen=True)
class Spot:
    """Where a fault lies: a file, and its text with the fault."""

    path: Path
    text: str


@dataclass(frozen=True)
class Tree:
    """The texts of the package and of the tests of a tree, without any fault."""

    root: Path
    package: dict[Path, str]
    tests: dict[Path, str]

    @classmethod
    def read(cls, root: Path) -> Tree:
        """Read a tree, without the recorder's own tests."""
        tests = [path for path in (root / "tests").rglob("test_*.py") if "behaviour" not in path.parts]
        return cls(root, _texts((root / "relayrun").rglob("*.py")), _texts(tests))


def _texts(paths: Iterable[Path]) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths)}


def spot(fault: Fault, tree: Tree) -> Spot:
    """Find the place of a fault in a tree: the old text stands once in one function of the name that it gives.

    Where no function has that name any more, the old text must stand once in the whole package.
    """
    holders = {path: text for path, text in tree.package.items() if fault.old in text}
    inside = [(path, *part) for path, text in holders.items() for part in _functions(text, fault.function)]
    found = [(path, start, end) for path, start, end in inside if fault.old in holders[path][start:end]]
    found = found or [(path, 0, len(text)) for path, text in holders.items()]
    if len(found) != 1 or holders[found[0][0]].count(fault.old, *found[0][1:]) != 1:
        places = ", ".join(path.relative_to(tree.root).as_posix() for path in holders) or "no file"
        raise PlantError(f"{fault.name}: {fault.old!r} must stand once in {fault.function}; it stands in {places}")
    path, start, end = found[0]
    text = holders[path]
    planted = text[:start] + text[start:end].replace(fault.old, fault.new) + text[end:]
    if unknown := _names(planted) - _names(text) - set(dir(builtins)):  # any test would catch a NameError
        raise PlantError(f"{fault.name}: {path.relative_to(tree.root)} does not know {', '.join(sorted(unknown))}")
    return Spot(path=path, text=planted)


def _names(text: str) -> set[str]:
    """Return the plain names that a module reads, binds, imports, defines or takes as arguments."""
    nodes = list(ast.walk(ast.parse(text)))
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    found |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return found | {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}


def _functions(text: str, name: str) -> list[tuple[int, int]]:
    """Begin and end of all functions of a qualified name, `Class.method` for example, as places in a text."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[tuple[int, int]] = []

    def look(body: Iterable[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if prefix + node.name == name:
                    found.append((lines[node.lineno - 1], lines[node.end_lineno or node.lineno]))
                look(node.body, f"{prefix}{node.name}.")

    look(ast.parse(text).body, "")
    return found


def node_ids(tests: Sequence[str], tree: Tree) -> list[str]:
    """Return pytest's ids of all tests that have one of these names, with or without a parameter in brackets."""
    found: list[str] = []
    for test in tests:
        name = test.partition("[")[0]
        places = [path for path, text in tree.tests.items() if re.search(rf"^(?:async )?def {name}\(", text, re.M)]
        if not places:
            raise PlantError(f"{name}: there is no such test")
        found += [f"{path.relative_to(tree.root).as_posix()}::{test}" for path in places]
    return found


def run_tests(ids: Sequence[str], root: Path) -> tuple[int, str]:
    """Run tests of a tree; return pytest's exit status and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", str(SECONDS), *ids]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1"),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, "the tests did not end"
    return done.returncode, done.stdout + done.stderr


def plant(fault: Fault, tree: Tree) -> str:
    """Plant one fault in a tree, run its tests, and take it out again; return what became of it in words."""
    place = spot(fault, tree)
    ids = node_ids(fault.tests, tree)
    before = place.path.read_bytes()
    place.path.write_text(place.text, encoding="utf-8")
    try:
        code, output = run_tests(ids, tree.root)
    finally:
        place.path.write_bytes(before)
    if code == 1:
        return "caught"
    return "not caught" if code == 0 else f"not tested (exit status {code})\n{output[-1500:]}"


def copy(target: Path) -> Path:
    """Copy the tree: all that git tracks, or will."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=600).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def main(only: Sequence[str] | None, *, list_alone: bool = False) -> int:
    """Plant faults, print what becomes of each; return 0 if all are caught. `only`: their names; default: all."""
    if unknown := set(only or ()) - {fault.name for fault in FAULTS}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    here = Tree.read(ROOT)
    try:
        for fault in chosen:  # before any test runs
            spot(fault, here)
            node_ids(fault.tests, here)
    except PlantError as error:
        raise SystemExit(f"error: {error}") from None
    if list_alone:
        print(f"{len(chosen)} faults can be placed")
        return 0
    with tempfile.TemporaryDirectory(prefix="record-faults-") as folder:
        return _all(chosen, [Tree.read(copy(Path(folder) / str(number))) for number in range(COPIES)])


def _all(chosen: Sequence[Fault], trees: Sequence[Tree]) -> int:
    """Plant faults in several trees at a time; the tests must pass without any fault first."""
    ids = sorted({each for fault in chosen for each in node_ids(fault.tests, trees[0])})
    code, output = run_tests(ids, trees[0].root)
    if code:
        print(f"the tests fail without a fault\n{output[-3000:]}")
        return 1
    free: Queue[Tree] = Queue()
    for tree in trees:
        free.put(tree)

    def work(fault: Fault) -> bool:
        tree = free.get()
        try:
            found = plant(fault, tree)
        finally:
            free.put(tree)
        print(f"{fault.name} ({fault.room}): {found}", flush=True)
        return found == "caught"

    with ThreadPoolExecutor(len(trees)) as pool:
        caught = list(pool.map(work, chosen))
    print(f"{sum(caught)} of {len(caught)} faults are caught")
    return 0 if all(caught) else 1
