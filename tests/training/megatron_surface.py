"""Prints what relayrun uses of megatron-core and the installed version does not have, a line each.

Reads the source of the package: names that are imported from megatron-core, attributes of its modules, the arguments of
calls to its functions and classes, and the methods of its classes that ours override.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import relayrun

PACKAGE = Path(relayrun.__file__).parent
BY_VERSION = PACKAGE / "train/megatron_versions.py"
"""What differs between versions: it asks for itself what is there."""
OPTIONAL = {("moe_utils", "te_general_gemm"), ("layers", "fused_weight_gradient_mlp_cuda")}
"""Names that are there with TransformerEngine or Apex alone, and are set here."""
OWN = {"held", "initialize_state", "get_extra_state", "set_extra_state"}
"""Methods that are new in a class of ours, or hooks of torch's modules."""


def found_in(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The objects that a file imports from megatron-core, by the name it has there, and what could not be imported."""
    objects: dict[str, Any] = {}
    problems = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("megatron.core"):
            continue
        assert node.module is not None
        for alias in node.names:
            try:
                module = importlib.import_module(node.module)
                found = getattr(module, alias.name, None)
                objects[alias.asname or alias.name] = (
                    importlib.import_module(f"{node.module}.{alias.name}") if found is None else found
                )
            except ImportError:
                problems.append(f"{node.module} has no {alias.name}")
    return objects, problems


def of_call(node: ast.Call, called: Any, name: str) -> Iterator[str]:
    """What a call gives that a function or class does not take."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return
    taken = {each.name for each in parameters}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in taken:
                yield f"{name} takes no {keyword.arg}"
    whole = not any(isinstance(each, ast.Starred) for each in node.args)
    if not whole or any(keyword.arg is None for keyword in node.keywords):
        return
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(node.args) > len(places) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        yield f"{name} takes {len(places)} arguments by place"
    given = {each.name for each in places[: len(node.args)]} | {keyword.arg for keyword in node.keywords}
    for each in parameters:
        named = each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if named and each.default is each.empty and each.name not in given:
            yield f"{name} wants {each.name}"


def problems_of(path: Path) -> Iterator[str]:
    """What one file uses that is not there."""
    objects, missing = found_in(path)
    yield from missing
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = objects.get(node.value.id)
            if (
                isinstance(module, ModuleType)
                and not hasattr(module, node.attr)
                and (node.value.id, node.attr) not in OPTIONAL
            ):
                yield f"{module.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call):
            called, name = None, ast.unparse(node.func)
            if isinstance(node.func, ast.Name):
                called = objects.get(node.func.id)
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                called = getattr(objects.get(node.func.value.id), node.func.attr, None)
            if callable(called):
                yield from of_call(node, called, name)
            if name == "_replace" and isinstance(node.args[1], ast.Constant):  # what is patched must be there
                owner, attribute = objects.get(ast.unparse(node.args[0])), str(node.args[1].value)
                if isinstance(owner, ModuleType) and not hasattr(owner, attribute):
                    yield f"{owner.__name__} has no {attribute}"
        elif isinstance(node, ast.ClassDef):
            bases = [objects[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in objects]
            for method in node.body if bases else []:
                if (
                    isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("__")
                    and method.name not in OWN
                    and any(each.attr == method.name for each in ast.walk(method) if isinstance(each, ast.Attribute))
                    and not any(hasattr(base, method.name) for base in bases)
                ):
                    yield f"{bases[0].__name__} has no {method.name}"


def main(paths: list[Path]) -> None:
    """Print them, of the package's files and of these."""
    checked = 0
    for path in [*sorted(PACKAGE.rglob("*.py")), *paths]:
        if path == BY_VERSION or "programs" in path.parts or "megatron.core" not in path.read_text():
            continue
        checked += len(found_in(path)[0])
        for problem in problems_of(path):
            print(f"{path.name}: {problem}")
    print(f"{checked} imported names")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main([Path(each) for each in sys.argv[1:]])
