"""Commands that people call again and again import what they need, and nothing that takes long."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun import places

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "pydantic",
    "yaml",
    "numpy",
    "rich",
    "torch",
    "tokenizers",
    "relayrun.control.trainers.registry",
    "relayrun.config.compose",
)
SCRIPTS = [
    path for folder in ("benchmarks", "examples", "launchers", "scripts") for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("words", [["--help"], ["status"], ["logs", "p/1"]], ids=" ".join)
def test_a_command_imports_no_more_than_it_needs(words: list[str], tmp_path: Path) -> None:
    (tmp_path / places.PROJECT_MARKER).touch()
    (tmp_path / "logs/runs/p/1").mkdir(parents=True)
    code = "import sys\nfrom relayrun.cli import main\n"
    code += f"try:\n    main({words})\nexcept SystemExit:\n    pass\nprint(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600
    )
    assert not set(done.stderr.splitlines()) & set(HEAVY)


def defined(path: Path) -> set[str]:
    """Every name that a module gives to others."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_names_that_are_there(path: Path) -> None:
    """Nobody runs most of these in tests, and a name that has moved would be found by the one who needs it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in ("relayrun", "tests"):
            continue
        module = ROOT / (node.module or "").replace(".", "/")
        source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        for alias in node.names:
            there = (module / alias.name).is_dir() or (module / f"{alias.name}.py").is_file()
            assert there or alias.name in defined(source), f"{node.module}.{alias.name}"
