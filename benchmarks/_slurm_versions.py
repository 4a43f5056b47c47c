#!/usr/bin/env python3
"""Chains on several versions of Slurm: the tests that pass on each, and the attempts that these tests begin.

    benchmarks/_slurm_versions.py VERSION [TEST_FILE ...]     runs tests of tests/slurm, one file after the other; tests
                                                              that fail get a second try
    benchmarks/_slurm_versions.py                             only writes the pages

Without files it runs those of `make test-slurm`. Results: benchmarks/results/slurm_versions.json, from which the table
in CONTRIBUTING.md and the attempts in README.md and docs/explanation/where-it-ran.md are written. Several versions may
run side by side.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/slurm_versions.json"
IN_VERSION = ROOT / "scripts/tools/slurm_version.sh"
BEGIN, END = "<!-- benchmarks/_slurm_versions.py wrote this -->\n", "<!-- up to here -->\n"


def run(version: str, name: str) -> dict[str, Any]:
    """Run one file of tests, and again those that fail; return how it went."""
    results, attempts = _once(version, name, [])
    failed = [test for test, passed in results.items() if not passed]
    again, more = _once(version, name, failed) if failed else ({}, 0)
    return {
        "tests": len(results),
        "passed": len(results) - len(failed),
        "passed_again": sum(again.values()),
        "attempts": attempts + more,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _once(version: str, name: str, tests: list[str]) -> tuple[dict[str, bool], int]:
    """Run all tests of a file, or some; return whether each passed, and the attempts that they began."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:  # short: sockets lie below it
        report, file = Path(folder) / "report.xml", f"tests/slurm/{name}.py"
        options = ["-n0", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/t", f"--junitxml={report}"]
        pytest = [sys.executable, "-m", "pytest", *options, *([f"{file}::{test}" for test in tests] or [file])]
        subprocess.run([IN_VERSION, "run", version, "env", f"SLURM_VERSION={version}", *pytest], cwd=ROOT, check=False)
        cases = [case for case in ET.parse(report).getroot().iter("testcase") if case.find("skipped") is None]
        found = {str(case.get("name")): not {"failure", "error"} & {each.tag for each in case} for case in cases}
        return found, len(list(Path(folder).rglob("begin.json")))


def read() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}


def record(version: str, name: str, found: dict[str, Any]) -> None:
    """Add the result of one file to the others."""
    slurm = subprocess.run([IN_VERSION, "run", version, "slurmctld", "-V"], capture_output=True, text=True, check=True)
    with Path(__file__).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read()
        of_version = results.setdefault(version, {"slurm": "", "files": {}})
        of_version["slurm"] = slurm.stdout.split()[-1]
        of_version["files"][name] = found
        RESULT.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """What passed: a row for each file of tests, a column for each version."""
    versions = sorted(results)
    names = sorted({name for version in versions for name in results[version]["files"]})
    rows = [["tests", *(results[version]["slurm"] for version in versions)], ["---"] * (1 + len(versions))]
    rows += [[f"`{name}.py`", *(_cell(results[version]["files"].get(name)) for version in versions)] for name in names]
    rows.append(["attempts", *(f"{attempts(results, version):,}" for version in versions)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    again = found.get("passed_again", 0)
    return f"{found['passed'] + again} of {found['tests']}" + (f", {again} at the second try" if again else "")


def attempts(results: dict[str, Any], version: str) -> int:
    """Attempts that the tests on a version began."""
    return sum(found["attempts"] for found in results[version]["files"].values())


def sentence(results: dict[str, Any]) -> str:
    """Versions with their attempts."""
    *first, last = (f"{attempts(results, version):,} on {results[version]['slurm']}" for version in sorted(results))
    return f"{', '.join(first)} and {last}" if first else last


def written(page: str, text: str) -> str:
    """A page with this text between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}{text}{END}{rest.partition(END)[2]}"


COUNTED = {
    "README.md": r"(?<=\(attempts: )[^)]*",
    "docs/explanation/where-it-ran.md": r"(?<=one machine:\n)[^)]*?(?=\.\n)",
}
"""Where the sentence stands."""


def pages() -> dict[Path, str]:
    """Each page as the results have it."""
    results = read()
    found = {"CONTRIBUTING.md": written((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), table(results))}
    for name, place in COUNTED.items():
        found[name] = re.sub(place, sentence(results), (ROOT / name).read_text(encoding="utf-8"), count=1)
    return {ROOT / name: text for name, text in found.items()}


def test_files() -> list[str]:
    """The files of `make test-slurm`."""
    found = re.search(r"SLURM_TESTS := (.*?)\)\n", (ROOT / "Makefile").read_text(encoding="utf-8"), re.S)
    assert found is not None
    return re.findall(r"(test_\w+)\.py", found[1])


def main() -> None:
    if len(sys.argv) > 1:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in sys.argv[2:] or test_files():
            found = run(sys.argv[1], name)
            record(sys.argv[1], name, found)
            print(f"{sys.argv[1]} {name}: {found}", flush=True)
        return
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
