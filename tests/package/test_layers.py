"""Dependencies point one way, and what runs on a bare host Python imports the standard library alone."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import relayrun

PACKAGE = Path(__file__).resolve().parents[2] / "relayrun"
ORDER = re.findall(r"^    ([a-z.]+) ", relayrun.__doc__ or "", re.M)
"""The rooms, each of which imports only those behind it: read from the one place where people read them."""
STANDARD_LIBRARY_ONLY = ("", "control", "trust", "slurmtime", "places", "masking", "client")
STANDARD_LIBRARY_ONLY += ("publishing", "files", "leftovers", "errors", "progress", "terminal")
PLAIN_SECTIONS = tuple(
    PACKAGE / f"config/sections/{name}.py" for name in ("dataclass_section", "batch_systems", "chain", "command")
)
HEAVY = ("train",)
"""Rooms that may import torch and megatron-core; and so may:"""
HEAVY_MODULES = (
    PACKAGE / "lab" / "loss_terms.py",
    PACKAGE / "loader" / "torch_batches.py",
    PACKAGE / "loader" / "trainer_samples.py",
    *(PACKAGE / "lab" / "gpucheck" / "programs").glob("*.py"),
    *(PACKAGE / "submit" / "megatron_lm" / "programs").glob("*.py"),
)
MOST_FLAT = 16
"""Modules beside each other in one package, without `__init__`."""

_MODULE = re.compile(r"(relayrun(?:\.\w+)+)(?::\w+)?")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path, package: Path = PACKAGE) -> str:
    """relayrun/control/decisions.py → chain.decide; relayrun/control/chain/__init__.py → chain"""
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, package: Path = PACKAGE) -> frozenset[str]:
    """Dotted names of all modules that a module imports, also inside functions, or names in a string to start them."""
    return _imports(path, path.read_text(), package)


@functools.cache  # every rule asks every module
def _imports(path: Path, source: str, package: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            inside = package.parent.joinpath(*module.split("."))
            for alias in node.names:
                own = (inside / f"{alias.name}.py").is_file() or (inside / alias.name / "__init__.py").is_file()
                names.add(f"{module}.{alias.name}" if own else module)
        elif isinstance(node, ast.Constant) and (named := _MODULE.fullmatch(str(node.value))):
            inside = package.parent.joinpath(*named[1].split("."))
            if inside.is_dir() or inside.with_suffix(".py").is_file():
                names.add(named[1])
    return frozenset(names)


def used(path: Path, package: Path = PACKAGE) -> set[str]:
    """Modules of relayrun that a module uses, without the leading `relayrun.`."""
    return {name.removeprefix("relayrun.") for name in imports(path, package) if name.startswith("relayrun.")}


def room(path: Path, package: Path = PACKAGE) -> str:
    """The room of a module; empty for the package itself, and for a package that only holds rooms."""
    return next((each for each in ORDER if _lies_in(dotted(path, package), each)), "")


def _lies_in(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def wrong_way(path: Path, package: Path = PACKAGE) -> set[str]:
    """The modules of higher rooms that a module uses."""
    own = room(path, package)
    below = ORDER[ORDER.index(own) :] if own else ORDER
    return {name for name in used(path, package) if not any(_lies_in(name, each) for each in below)}


def test_every_module_lies_in_a_room() -> None:
    outside = [dotted(path) for path in modules() if not room(path)]
    assert outside == ["__init__", "__main__", "config"]
    assert {room(path) for path in modules()} == {"", *ORDER}
    assert len(set(ORDER)) == len(ORDER)


def test_a_package_is_seen_at_a_glance() -> None:
    flat = {folder: len([*folder.glob("*.py")]) - 1 for folder in {path.parent for path in modules()}}
    assert not {str(folder): count for folder, count in flat.items() if count > MOST_FLAT}


def test_dependencies_point_one_way() -> None:
    assert not {dotted(path): wrong for path in modules() if (wrong := wrong_way(path))}


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("files.py", "from relayrun.cli import main"),
        ("control/rundir/records.py", "from relayrun.config.compose import schema"),
        ("tokens/order/sampler.py", "def later():\n    from relayrun.train.model import size"),
        ("config/sections/data.py", 'ORDER = "relayrun.tokens.order.datasets:MockDataset"'),
        ("files.py", 'COMMAND = ["python3", "-m", "relayrun.control.chain"]'),
    ],
)
def test_a_planted_import_in_the_wrong_direction_is_found(tmp_path: Path, place: str, line: str) -> None:
    package = tmp_path / "relayrun"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / place
    assert not wrong_way(path, package)
    path.write_text(path.read_text() + "\n" + line + "\n")
    assert wrong_way(path, package)


@pytest.mark.parametrize("package", sorted({path.parent for path in modules()} - {PACKAGE}), ids=dotted)
def test_siblings_do_not_import_each_other_in_a_circle(package: Path) -> None:
    """The files and folders of a package have an order too."""
    inside = dotted(package).removesuffix(".__init__") + "."
    graph: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        if path == package / "__init__.py":
            continue
        own = path.relative_to(package).parts[0].removesuffix(".py")
        others = {name.removeprefix(inside).split(".")[0] for name in used(path) if name.startswith(inside)}
        graph.setdefault(own, set()).update(others - {own})
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(error.args[1]) from None


def test_the_sections_of_jobs_are_there() -> None:
    """A name that moves must not take its file out of the rule below."""
    assert all(path.is_file() for path in (*PLAIN_SECTIONS, *HEAVY_MODULES))


def test_heavy_imports_stay_where_they_are_needed() -> None:
    for path in modules():
        roots = {name.split(".")[0] for name in imports(path)}
        if room(path) in STANDARD_LIBRARY_ONLY or path in PLAIN_SECTIONS:
            assert roots <= set(sys.stdlib_module_names) | {"relayrun"}, path
        if room(path) not in HEAVY and path not in HEAVY_MODULES:
            assert not roots & {"torch", "megatron"}, path


def test_only_the_scheduler_starts_slurm_commands() -> None:
    commands = {"sbatch", "squeue", "scontrol", "scancel", "sinfo", "sacct", "srun"}
    for path in modules():
        source = path.read_text()
        if path.parent == PACKAGE / "control" / "scheduler" or not any(command in source for command in commands):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
                assert node.elts[0].value not in commands, f"{path}:{node.lineno}"


def constructed_schedulers(source: str) -> list[int]:
    """Lines that construct a scheduler."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if ast.unparse(call.func).split(".")[-1] in ("Slurm", "LocalScheduler")]


def test_only_the_scheduler_constructs_schedulers() -> None:
    others = [path for path in modules() if path.parent != PACKAGE / "control" / "scheduler"]
    assert not {str(path): lines for path in others if (lines := constructed_schedulers(path.read_text()))}
    assert constructed_schedulers("scheduler = slurm.Slurm(patience=0)") == [1]


def test_a_submit_does_not_import_torch() -> None:
    code = "import sys, relayrun.cli.run.submit, relayrun.submit.submission; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert result.stdout == "False\n"


def test_the_supervisor_runs_on_a_bare_host_python() -> None:
    """Isolated from the environment's packages: -S leaves site-packages out."""
    result = subprocess.run(
        [sys.executable, "-S", "-m", "relayrun.control.chain", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(PACKAGE.parent)},
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "begin" in result.stdout
