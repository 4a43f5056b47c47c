"""Mutants of the chain and of the scheduler: how many do histories and unit tests catch?

`python -m tests.histories.mutants COUNT SEED` plants one change at a time into a copy of the package, plays histories
until one breaks a law, and runs the tests of the changed module if none does. `--no-tests`: histories alone.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "chain/excluded_nodes.py": "control/test_node_health control/test_nodes chain/test_next_nodes",
    "chain/failover.py": "chain/test_orphaned chain/test_making_place chain/test_fallback_job",
    "chain/jobs.py": "chain/test_making_place chain/test_control chain/test_next_nodes chain/test_exhaustion",
    "chain/requested_options.py": "control/test_requested_options chain/test_real_limits",
    "chain/supervisor.py": "chain/test_exhaustion chain/test_real_limits chain/test_orphaned chain/test_next_nodes",
    "chain/watch.py": "control/test_watch chain/test_exhaustion chain/test_real_limits",
    "scheduler/slurm.py": "control/test_scheduler control/test_spare_nodes chain/test_next_nodes chain/test_control",
    "scheduler/slurm_commands.py": "control/test_scheduler control/test_slurm_states control/test_sbatch_and_setup",
}
"""Files that get mutants, and the tests of each."""
HISTORIES = 40
SECONDS = 300.0
OTHER = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OTHER |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    what: str
    text: str


def places_in(file: str) -> Iterator[tuple[str, int]]:
    """The file and the number of every part of it that can be changed."""
    for number, node in enumerate(ast.walk(ast.parse((ROOT / "relayrun/control" / file).read_text(encoding="utf-8")))):
        if _change(copy.deepcopy(node)):
            yield file, number


def mutant_at(file: str, number: int) -> Mutant:
    """A file with one part changed: a condition turned round, or a call left out."""
    tree = ast.parse((ROOT / "relayrun/control" / file).read_text(encoding="utf-8"))
    node = list(ast.walk(tree))[number]
    what = _change(node)
    return Mutant(file, getattr(node, "lineno", 0), what, ast.unparse(tree))


def _change(node: ast.AST) -> str:
    before = copy.deepcopy(node)
    if isinstance(node, (ast.If, ast.IfExp)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return f"not {ast.unparse(node.test.operand)}"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        node.ops[0] = OTHER[type(node.ops[0])]()
        return f"{ast.unparse(before)} becomes {ast.unparse(node)}"
    if isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return f"{ast.unparse(before)} becomes {ast.unparse(node)}"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log_line" not in ast.unparse(node):
        node.value = ast.Constant(None)
        return f"without {ast.unparse(before)}"
    return ""


def sample(count: int, seed: int) -> list[Mutant]:
    """So many mutants of all files, each change as likely as another."""
    places = [place for file in TESTS for place in places_in(file)]
    return [mutant_at(*place) for place in random.Random(seed).sample(places, count)]


def caught_by(mutant: Mutant, tree: Path, *, tests: bool) -> str:
    """What catches a mutant: histories, tests, or nothing (empty)."""
    path = tree / "relayrun/control" / mutant.file
    before = path.read_bytes()
    path.write_text(mutant.text, encoding="utf-8")
    try:
        if not _passes(["-m", "tests.histories", "--first", "0", str(HISTORIES)], tree):
            return "histories"
        files = [f"tests/{name}.py" for name in TESTS[mutant.file].split()]
        options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not long and not slurm"]
        if tests and not _passes(["-m", "pytest", *options, *files], tree):
            return "tests"
    finally:
        path.write_bytes(before)
    return ""


def _passes(arguments: list[str], tree: Path) -> bool:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    """Plant mutants; return 1 if fewer than 95 of a hundred are caught."""
    count, seed, tests = int(sys.argv[1]), int(sys.argv[2]), "--no-tests" not in sys.argv
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "relayrun", tree / "relayrun", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "launchers", "configs", "scripts", "docs", "pyproject.toml", "README.md"):
            (tree / name).symlink_to(ROOT / name)
        for mutant in sample(count, seed):
            by = caught_by(mutant, tree, tests=tests)
            caught += bool(by)
            print(f"{by or 'NOT CAUGHT'}: {mutant.file}:{mutant.line}: {mutant.what}"[:220], flush=True)
    print(f"{caught} of {count} mutants are caught")
    return 0 if caught >= 0.95 * count else 1


if __name__ == "__main__":
    sys.exit(main())
