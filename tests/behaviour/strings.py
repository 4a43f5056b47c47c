"""Dotted names in code, job texts and scripts: each must lead to something; each program that they name must start.

The tree is scanned anew each time, so the record holds no name: it holds what each program does, by its role.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .masks import DOTTED, ROOT, environment, write_json
from .names import FORMER, HOST, PROGRAMS

TEXTS = (
    "launchers/**/*",
    "scripts/**/*",
    "container/*",
    "configs/**/*.yaml",
    "examples/**/*",
    "Makefile",
    "relayrun/**/*.sh",
)
PYTHON = ("relayrun/**/*.py", "launchers/*.py", "scripts/**/*.py", "examples/**/*.py", "benchmarks/*.py")

NAMED = re.compile(rf"{DOTTED.pattern}(?::[A-Za-z_]\w*)?")
STARTED = re.compile(r"""(?:-m|run_module\.py)[\s"',]+(relayrun(?:\.\w+)*)""")
IN_BASH = re.compile(r"^\s*(?:from|import) (relayrun[\w.]*)", re.M)
FILES = (".toml", ".def", ".sif", ".sqsh", ".pth")

LEAST = 100
"""A scan that finds fewer names has looked in the wrong place."""


@dataclass(frozen=True)
class Name:
    """A dotted name and the file that holds it."""

    text: str
    where: str


def scan(root: Path) -> tuple[set[Name], set[Name]]:
    """Return all dotted names of a tree, and the modules that `python -m` starts in it."""
    names: set[Name] = set()
    started: set[Name] = set()
    for path in sorted({each for pattern in (*TEXTS, *PYTHON) for each in root.glob(pattern) if each.is_file()}):
        if "__pycache__" in path.parts:
            continue
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        found = list(_of_python(ast.parse(text))) if path.suffix == ".py" else [text]
        for each in found:
            names |= {Name(hit, where) for hit in _named(each)}
            started |= {Name(hit, where) for hit in STARTED.findall(each)}
        if path.suffix != ".py":
            names |= {Name(hit, where) for hit in IN_BASH.findall(text)}
    started |= {Name(module, module) for module in guarded(root)}
    return names, started


def _named(text: str) -> Iterator[str]:
    yield from (hit for hit in NAMED.findall(text) if not hit.endswith(FILES) and hit not in FORMER)


def _of_python(tree: ast.Module) -> Iterator[str]:
    """Texts of a module that may hold dotted names: strings, words of a command side by side, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            yield node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
        elif isinstance(node, (ast.List, ast.Tuple)):
            words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            yield " ".join(word for word in words if isinstance(word, str))
        elif isinstance(node, ast.Import):
            yield " ".join(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield " ".join(f"{node.module}:{each.name}" for each in node.names)


def guarded(root: Path) -> Iterator[str]:
    """Yield the modules of the package that are programs: `__main__.py`, or a guard at the end."""
    for path in sorted((root / "relayrun").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name == "__main__.py" or re.search(r"^if __name__ == .__main__.:", text, re.M):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


RESOLVE = """
import importlib, json, sys

def lookup(value, name):
    if hasattr(value, name):
        return getattr(value, name)
    if name in getattr(value, "__annotations__", {}):  # a field without a default
        return None
    raise AttributeError(f"{value!r} has no {name}")

def longest(parts):
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            return importlib.import_module(module), parts[end:]
        except ModuleNotFoundError as error:
            if error.name != module or end == 1:
                raise

found = {}
for name in json.load(sys.stdin):
    dotted, _, attribute = name.partition(":")
    try:
        value, rest = longest(dotted.split("."))
        for part in rest:
            value = lookup(value, part)
        if attribute:
            try:
                lookup(value, attribute)
            except AttributeError:  # a module that `from` imports
                importlib.import_module(f"{dotted}.{attribute}")
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
json.dump(found, sys.stdout)
"""
"""Runs in a process of its own, which has the tree on its path."""


def unresolved(names: Iterable[str], root: Path) -> dict[str, str]:
    """Import all names in one process; return those that lead to nothing, with the reason."""
    with tempfile.TemporaryDirectory(prefix="record-strings-") as elsewhere:
        done = subprocess.run(
            [sys.executable, "-P", "-c", RESOLVE],
            input=json.dumps(sorted(set(names))),
            env=environment(PYTHONPATH=str(root)),
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def start(module: str, root: Path, *options: str) -> str:
    """Start a program with `--help`; return its exit status, and the last word of a traceback.

    `options`: of Python, such as `-S`.
    """
    with tempfile.TemporaryDirectory(prefix="record-program-") as elsewhere:
        done = subprocess.run(
            [sys.executable, "-P", *options, "-m", module, "--help"],
            env=environment(PYTHONPATH=str(root)),
            cwd=elsewhere,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        made = sorted(path.name for path in Path(elsewhere).iterdir())
    error = re.findall(r"^(\w+(?:Error|Exception|Exit))\b", done.stderr, re.M)
    found = f"exit status {done.returncode}" + (f", {error[-1]}" if error else "")
    return found + (f", makes {', '.join(made)}" if made else "")


def of_the_host(root: Path) -> set[str]:
    """Return the modules that jobs start with the host's Python, which has no packages."""
    found: set[str] = set()
    for path in root.glob("launchers/**/*.sh"):
        found |= set(re.findall(r"run_module\.py\" (relayrun[\w.]*)", path.read_text(encoding="utf-8")))
    for path in root.glob("relayrun/**/*.py"):
        found |= set(re.findall(r"host_command\(\"(relayrun[\w.]*)\"\)", path.read_text(encoding="utf-8")))
    return found


def programs(modules: Iterable[str], root: Path) -> dict[str, Any]:
    """Return what each program does with `--help`, by its role.

    Programs that the host's Python starts are also started without packages.
    """
    host = of_the_host(root)

    def look(module: str) -> tuple[str, dict[str, str]]:
        role = PROGRAMS.get(module, f"no role in names.py: {module}")
        found = {"--help": start(module, root)}
        if role in HOST or module in host:
            found["--help, standard library alone"] = start(module, root, "-S")
        return role, found

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(look, sorted(set(modules))))


def record(folder: Path) -> None:
    """Write what cannot be resolved, which shall be nothing, and what each program does."""
    names, started = scan(ROOT)
    if len(names) < LEAST:
        raise RuntimeError(f"only {len(names)} dotted names were found")
    reasons = unresolved((each.text for each in names | started), ROOT)
    lost = sorted(
        f"{each.text} in {each.where}: {reasons[each.text]}" for each in names | started if each.text in reasons
    )
    write_json(folder / "unresolved.json", lost)
    unguarded = {each.text for each in started} - set(guarded(ROOT))
    write_json(folder / "not_programs.json", sorted(unguarded))
    write_json(folder / "programs.json", programs((each.text for each in started), ROOT))
