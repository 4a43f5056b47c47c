"""Dependencies point one way, and what runs on a bare host Python imports the standard library alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "relayrun"
SIBLINGS = {"tokenization", "data", "training", "chain", "export", "monitoring", "demo", "drill"}
TOP = {"cli", "submission", "settings", "preflight", "codebase", "loading"}
BASE = {"errors", "files", "indexed", "passing", "slurmtime", "__init__"}
STANDARD_LIBRARY_ONLY = ("chain", "rundir", "errors", "files", "slurmtime", "__init__")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of all that a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "relayrun":
                names |= {f"relayrun.{alias.name}" for alias in node.names}
    return names


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path) -> None:
    own = part(path)
    used = {name.split(".")[1] for name in imports(path) if name.startswith("relayrun.")}
    if own in BASE:
        assert used <= {"errors", "files", "passing"}, used
    elif own in ("config", "rundir"):
        assert used <= {own, "errors", "files", "slurmtime"}, used
    elif own == "chain":
        assert used <= {"chain", "rundir", "errors", "files", "slurmtime"}, used
    elif own in SIBLINGS:
        assert not used & TOP, used


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_imports_stay_where_they_are_needed(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    if part(path) in STANDARD_LIBRARY_ONLY:
        assert roots <= set(sys.stdlib_module_names) | {"relayrun"}, roots
    if part(path) not in ("training", "export"):
        assert not roots & {"torch", "megatron"}, roots


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_scheduler_starts_slurm_commands(path: Path) -> None:
    if path == PACKAGE / "chain" / "scheduler.py":
        return
    commands = {"sbatch", "squeue", "scontrol", "scancel", "sinfo", "sacct", "srun"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
            assert node.elts[0].value not in commands, f"{path}:{node.lineno}"


def test_a_submit_does_not_import_torch() -> None:
    code = "import sys, relayrun.cli, relayrun.submission; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_the_supervisor_runs_on_a_bare_host_python() -> None:
    """Isolated from the environment's packages: -S leaves site-packages out."""
    result = subprocess.run(
        [sys.executable, "-S", "-m", "relayrun.chain", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert result.returncode == 0, result.stderr
    assert "begin" in result.stdout
