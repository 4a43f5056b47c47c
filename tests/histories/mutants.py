"""Mutants of the chain and of the scheduler: how many do histories and unit tests catch?

`python -m tests.histories.mutants COUNT SEED` plants one change at a time into a copy of the package, plays histories
until one breaks a law, and runs the tests of the changed module if none does. `--no-tests`: histories alone. A run
that is not over in time decides nothing: such a mutant is counted apart. Before the first mutant of a file its tests
must pass.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "chain/excluded_nodes.py": "control/test_nodes chain/test_guard chain/test_next_nodes control/test_node_health",
    "chain/failover.py": "chain/test_orphaned chain/test_making_place chain/test_fallback_job "
    "chain/test_end_of_attempt",
    "chain/jobs.py": "chain/test_control chain/test_real_limits chain/test_making_place chain/test_next_nodes",
    "chain/requested_options.py": "chain/test_end_of_attempt control/test_requested_options chain/test_real_limits",
    "chain/supervisor.py": "chain/test_end_of_attempt "
    "chain/test_real_limits control/test_time_limit chain/test_next_nodes chain/test_law",
    "chain/watch.py": "chain/test_hang_ends chain/test_guard control/test_watch chain/test_real_limits",
    "scheduler/slurm.py": "control/test_scheduler control/test_slurm_orders control/test_slurm_ends "
    "control/test_slurm_jobs control/test_slurm_answers control/test_spare_nodes chain/test_law",
    "scheduler/slurm_commands.py": "control/test_slurm_jobs control/test_slurm_orders control/test_slurm_states "
    "control/test_sbatch_and_setup",
}
"""Files that get mutants, and the tests of each, the quickest first."""
HISTORIES = 40
SECONDS = 600.0
UNDECIDED = "not decided"
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
    """What catches a mutant: histories, tests, or nothing (empty); UNDECIDED if a run was not over in time."""
    path = tree / "relayrun/control" / mutant.file
    before = path.read_bytes()
    path.write_text(mutant.text, encoding="utf-8")
    try:
        played = _passes(["-m", "tests.histories", "--first", "0", str(HISTORIES)], tree)
        tested = _passes_tests(mutant.file, tree) if tests and played is not False else None if tests else True
    finally:
        path.write_bytes(before)
    if played is False:
        return "histories"
    if tested is False:
        return "tests"
    return UNDECIDED if None in (played, tested) else ""


def _passes_tests(file: str, tree: Path) -> bool | None:
    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not long and not slurm"]
    return _passes(["-m", "pytest", *options, *(f"tests/{name}.py" for name in TESTS[file].split())], tree)


def _passes(arguments: list[str], tree: Path, *, seconds: float = SECONDS) -> bool | None:
    """Return whether a program succeeds; None if it is not over in time, which may be the machine's fault."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # and what it started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def copy_of_package(folder: Path) -> Path:
    """A tree with a copy of the package to change, and links to everything else."""
    shutil.copytree(ROOT / "relayrun", folder / "relayrun", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "launchers", "configs", "scripts", "docs", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def main() -> int:
    """Plant mutants; return 1 if fewer than 95 of a hundred are caught."""
    count, seed, tests = int(sys.argv[1]), int(sys.argv[2]), "--no-tests" not in sys.argv
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tree, passed = copy_of_package(Path(folder)), set[str]()
        for mutant in sample(count, seed):
            if tests and mutant.file not in passed and not _passes_tests(mutant.file, tree):
                sys.exit(f"the tests of {mutant.file} do not pass without a mutant: they could catch none")
            passed.add(mutant.file)
            by = caught_by(mutant, tree, tests=tests)
            found[by] += 1
            print(f"{by or 'NOT CAUGHT'}: {mutant.file}:{mutant.line}: {mutant.what}"[:220], flush=True)
    caught = found["histories"] + found["tests"]
    print(f"{caught} of {count} mutants are caught, {found[UNDECIDED]} not decided: {dict(found)}")
    return 0 if caught >= 0.95 * count else 1


if __name__ == "__main__":
    sys.exit(main())
