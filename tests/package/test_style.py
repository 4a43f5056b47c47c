"""Rules of style that ruff does not know. Each is one sentence, the docstring of its test."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SLEEPS = {"sleep", "time.sleep", "sigtimedwait", "signal.sigtimedwait"}
MAY_POLL = {
    "tests/waiting.py",
    *(f"tests/chain/{name}.py" for name in ("forked_ranks", "relay_program", "restarted_program")),
}
"""Besides the one helper, programs that tests run as ranks."""


def sources() -> list[Path]:
    """The *.py that git tracks, and those in the package and its programs that it does not track yet."""
    tracked = subprocess.run(["git", "ls-files", "-z", "--", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout
    found = {ROOT / name for name in tracked.split("\0") if name}
    found |= {
        path for folder in ("relayrun", "scripts", "launchers", "tests") for path in (ROOT / folder).rglob("*.py")
    }
    return sorted(path for path in found if path.is_file())


def below(*folders: str) -> list[Path]:
    return [path for path in sources() if path.relative_to(ROOT).parts[0] in folders]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands as a statement: docstrings, and what stands below a field."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(text := node.value.value, str)
        ):
            yield node.lineno, text


def unformatted(source: str) -> list[int]:
    """Lines with a comment that takes code away from the formatter."""
    if "fmt:" not in source:  # to cut a file into tokens takes long
        return []
    comments = (
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    )
    return [token.start[0] for token in comments if re.match(r"#\s*fmt:\s*(skip|off)", token.string)]


def fragments(source: str) -> list[int]:
    """Lines of docstrings that begin with "Of"."""
    if not re.search(r"""["']\s*Of\b""", source):
        return []
    return [line for line, text in docstrings(source) if re.match(r"\s*Of\b", text)]


def printed_warnings(source: str) -> list[int]:
    """Lines of calls of `print` with a warning in their text, the fixed parts of f-strings included."""
    if "print" not in source or "warning" not in source.lower():
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and any(
            isinstance(part, ast.Constant) and isinstance(part.value, str) and "warning" in part.value.lower()
            for argument in node.args
            for part in ast.walk(argument)
        )
    ]


def polling_loops(source: str) -> list[int]:
    """Lines of `while` loops that sleep."""
    if not re.search(r"\b(sleep|sigtimedwait)\(", source):
        return []
    return [
        loop.lineno
        for loop in ast.walk(ast.parse(source))
        if isinstance(loop, ast.While)
        and any(isinstance(node, ast.Call) and ast.unparse(node.func) in SLEEPS for node in ast.walk(loop))
    ]


def is_sentence(text: str) -> bool:
    """Whether a docstring begins with a capital or no letter, and its first paragraph ends with a full stop or such."""
    first = text.strip().split("\n\n")[0].rstrip()
    return bool(first) and not first[0].islower() and first[-1] in ".:?!)"


def unfinished(source: str) -> list[int]:
    """Lines of docstrings that are no sentences."""
    return [line for line, text in docstrings(source) if not is_sentence(text)]


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Documented, ast.ClassDef | None]]:
    """Every public class, function and method, by its name with that of its class before it, and the class."""
    for child in node.body:
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)) and not child.name.startswith("_"):
            yield prefix + child.name, child, node if isinstance(node, ast.ClassDef) else None
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def methods(node: ast.ClassDef) -> dict[str, Documented]:
    return {child.name: child for child in node.body if isinstance(child, FUNCTIONS)}


def inherited(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Methods that a base class documents, or a protocol all of whose methods the class has."""
    bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
    own = methods(node).keys()
    return {
        method
        for name, other in classes.items()
        if name in bases
        or (methods(other) and "Protocol" in map(ast.unparse, other.bases) and methods(other).keys() <= own)
        for method, definition in methods(other).items()
        if ast.get_docstring(definition)
    }


def undocumented(tree: ast.Module, classes: dict[str, ast.ClassDef]) -> list[str]:
    """What is public, longer than a statement, not documented by a base class, and without a docstring."""
    found = [] if ast.get_docstring(tree) else ["the module"]
    for full_name, node, owner in public(tree):
        short = len(node.body) == 1 and not isinstance(node, ast.ClassDef)
        if short or ast.get_docstring(node) is not None:
            continue
        if owner is None or node.name not in inherited(owner, classes):
            found.append(f"{node.lineno}: {full_name}")
    return found


def listed(broken: Mapping[str, Sequence[object]]) -> str:
    return "\n" + "\n".join(f"{file}: {', '.join(map(str, places))}" for file, places in broken.items())


def everywhere(paths: list[Path], check: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """Lines that break a rule, by file."""
    return {name(path): lines for path in paths if (lines := check(path.read_text(encoding="utf-8")))}


def test_the_formatter_decides_everywhere() -> None:
    """No line is taken away from the formatter."""
    broken = everywhere(sources(), unformatted)
    assert not broken, listed(broken)


def test_no_docstring_is_a_fragment() -> None:
    """No docstring begins with "Of": who reads it alone would not know what is meant."""
    broken = everywhere(sources(), fragments)
    assert not broken, listed(broken)


def test_warnings_are_logged() -> None:
    """A warning goes through `logging`, never through `print`."""
    broken = everywhere(below("relayrun", "scripts", "launchers", "benchmarks"), printed_warnings)
    assert not broken, listed(broken)


def test_tests_wait_by_one_helper() -> None:
    """A test waits by `tests.waiting.wait_for`, which has a limit, and not in a loop of its own."""
    broken = everywhere([path for path in below("tests") if name(path) not in MAY_POLL], polling_loops)
    assert not broken, listed(broken)


def test_docstrings_of_the_package_are_sentences() -> None:
    """A docstring begins with a capital, or with what is no letter (`name`), and ends with a full stop or colon."""
    broken = everywhere(below("relayrun"), unfinished)
    assert not broken, listed(broken)


def test_what_is_public_has_a_docstring() -> None:
    """Whatever is public has one, but for functions of one statement and methods that a base or protocol documents."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in below("relayrun")}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    broken = {name(path): missing for path, tree in trees.items() if (missing := undocumented(tree, classes))}
    assert not broken, listed(broken)


WITHOUT = '"""M."""\nclass A(B):\n    """A."""\n    def f(self):\n        g()\n        h()'
"""A module with a method that has no docstring."""

PLANTED: list[tuple[Callable[[str], list[int] | list[str]], str]] = [
    (unformatted, "x = [1,  2]  # fmt: skip"),
    (unformatted, "# fmt: off"),
    (fragments, 'BYTES = 3\n"""Of a block."""'),
    (fragments, 'def f():\n    """\n    Of a block.\n    """'),
    (printed_warnings, 'print("warning: no")'),
    (printed_warnings, 'print(\n    f"{time()} Warning: {error}", file=sys.stderr\n)'),
    (polling_loops, "while not done():\n    time.sleep(1)"),
    (polling_loops, "while True:\n    if done():\n        break\n    sleep(1)"),
    (lambda text: undocumented(ast.parse(text), {}), '"""M."""\ndef f():\n    x = 1\n    return x'),
    (lambda text: undocumented(ast.parse(text), {}), WITHOUT),
    (lambda text: undocumented(ast.parse(text), {}), "x = 1"),
]


@pytest.mark.parametrize(("check", "text"), PLANTED)
def test_a_planted_fault_is_found(check: Callable[[str], list[int] | list[str]], text: str) -> None:
    assert check(text) != []


def test_what_keeps_the_rules_is_let_pass() -> None:
    assert unformatted('text = "# fmt: skip"  # the formatter') == []
    assert fragments('"""Often so."""') == []
    assert printed_warnings('log.warning("no")\nprint("done")') == []
    assert polling_loops("while piece := read():\n    take(piece)\nfor each in range(3):\n    time.sleep(1)") == []
    for base in ("class B:", "class P(Protocol):"):  # A names B as its base, and has all that P asks for
        documented = ast.parse(f'{base}\n    def f(self):\n        """F."""').body[0]
        assert isinstance(documented, ast.ClassDef)
        assert undocumented(ast.parse(WITHOUT), {documented.name: documented}) == []
    assert undocumented(ast.parse('"""M."""\ndef f():\n    return 1\ndef _g():\n    x = 1\n    return x'), {}) == []
    assert is_sentence("`plan.json`: what is planned.\n\nMore")
    assert not is_sentence("plan.json: what is planned.")
    assert not is_sentence("What is planned")
