#!/usr/bin/env python3
"""Write docs/reference/python.md from the docstrings of the modules that programs import. Run it after a change."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "python.md"
MODULES = ("client", "loader", "checkpoints", "api")
HEAD = """# Python modules for your programs

What a program may import from relayrun. Everything else may change at any time. Within 0.N these names and
signatures stay; a change comes with 0.N+1 and stands in the changelog under *What to do*. Errors that are raised on
purpose are `relayrun.errors.RelayrunError`. `relayrun.client` needs Python 3.9 and nothing else, the other modules
3.11 and the base install; `as_torch` and `megatron_provider` need torch, `for_trainer` transformers too.

"""
Documented = ast.FunctionDef | ast.ClassDef


def names(module: str) -> Iterator[tuple[str, Documented | None]]:
    """Yield the signature of each public function, class, method and field of a module; where it has a docstring of its
    own, with its node."""
    path = ROOT / "relayrun" / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    chosen = [ast.literal_eval(node.value) for node in tree.body if ast.unparse(node).startswith("__all__ = ")]
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_") and node.name in (chosen or [[node.name]])[0]:
            if isinstance(node, ast.FunctionDef):
                yield _signature(node), node
                continue
            yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".replace("()", ""), node
            for each in node.body:
                if isinstance(each, ast.AnnAssign):
                    yield f"{node.name}.{ast.unparse(each)}", None
                elif isinstance(each, ast.FunctionDef) and (each.name == "__init__" or not each.name.startswith("_")):
                    yield f"{node.name}.{_signature(each)}", each


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    if any(ast.unparse(each) == "property" for each in node.decorator_list):
        return f"{node.name}: {ast.unparse(node.returns) if node.returns else ''}"
    return f"{node.name}({arguments})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def signatures() -> str:
    """Return all signatures as text, a line each."""
    return "".join(f"{module}: {signature}\n" for module in MODULES for signature, _ in names(module))


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for module in MODULES:
        path = ROOT / "relayrun" / module.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        words = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        parts.append(f"## relayrun.{module}\n\n```text\n{words}\n```\n\n")
        for signature, node in names(module):
            said = inspect.cleandoc((ast.get_docstring(node) or "") if node is not None else "")
            parts.append(f"```python\n{signature}\n```\n\n" + (f"{said}\n\n" if said else ""))
    return "".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
