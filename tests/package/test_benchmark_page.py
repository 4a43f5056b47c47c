"""docs/reference/benchmarks.md and the README say what the benchmarks measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def printed(code: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_the_page_is_that_of_the_results() -> None:
    made = printed("import _report; print(_report.render(), end='')")
    assert made == (ROOT / "docs" / "reference" / "benchmarks.md").read_text(), "run python benchmarks/_report.py"


def test_the_figures_of_the_readme_are_those_of_the_drill() -> None:
    made = printed("import _readme; print(_readme.written(_readme.README.read_text()), end='')")
    page = (ROOT / "README.md").read_text()
    assert made == page, "run python benchmarks/_readme.py"
    assert "| effective training time |" in page


def test_the_tests_and_attempts_on_each_slurm_are_those_of_the_results() -> None:
    code = "import json, _slurm_versions as s; print(json.dumps({str(page): text for page, text in s.pages().items()}))"
    for page, text in json.loads(printed(code)).items():
        assert Path(page).read_text() == text, "run python benchmarks/_slurm_versions.py"


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", cell)]


def test_a_reader_of_the_readme_computes_the_effective_training_time_that_stands_there() -> None:
    """Seconds of the same steps undisturbed, over seconds disturbed: of one turn as printed, of several in between."""
    lines = [line.split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = {line[0].removeprefix("| "): [numbers(cell) for cell in line[1:]] for line in lines}
    named = (
        "effective training time",
        "seconds from the first step to the last",
        "seconds of as many steps undisturbed",
    )
    shares, own, undisturbed = (rows[name] for name in named)
    compared = [each for each in zip(shares, own, undisturbed, strict=True) if each[0]]
    assert compared
    for share, seconds, alike in compared:
        assert min(share) - 0.1 <= 100 * alike[0] / seconds[0] <= max(share) + 0.1


ROWS = {
    (1.2,): "yes",
    (0.9,): "no",
    (1.2, 1.1, 1.3): "yes",
    (0.9, 0.8, 0.95): "no",
    (1.2, 0.9, 1.3): "undecided",
    (0.9, 0.8, 1.3): "undecided",
}
"""What is measured (median, smallest and largest), and whether `least` 1 is reached; `most` 1 the other way round."""


@pytest.mark.parametrize(("measured", "reached"), ROWS.items())
def test_a_target_is_reached_where_the_whole_spread_is_on_its_side(measured: tuple[float, ...], reached: str) -> None:
    value = dict(zip(("median", "min", "max"), measured, strict=True)) if len(measured) > 1 else measured[0]
    row = "_report.Row('it', 'a', '.1f', {}=1).lines({{'a': {}}})[0].split(' | ')[3]"
    least, most = printed(f"import _report; print({row.format('least', value)}, {row.format('most', value)})").split(
        " |"
    )[:2]
    assert least == reached
    assert most.strip() == {"yes": "no", "no": "yes"}.get(reached, reached)


def test_the_figures_of_turns_are_their_median_smallest_and_largest() -> None:
    turns = [{"spares": {"kills": 5, "all": {"p95": seconds}, "steps": [1]}} for seconds in (1.0, 3.0, 1.5)]
    assert printed(f"import _results; print(_results.spreads({turns})['spares'])") == (
        "{'kills': {'min': 5, 'median': 5, 'max': 5}, 'all': {'p95': {'min': 1.0, 'median': 1.5, 'max': 3.0}}}\n"
    )


TURNS = """
import argparse, kills

class Drill:
    options = argparse.Namespace(seed=1, spares=1, spares_part=1.0, minutes=1)

    def disturbed(self, name, *, stop_after, seed, **how):
        print(name, stop_after, seed)
        return None, []

    def alone(self, name, *, spares, stop_after):
        print(name, stop_after, spares)

kills.Turn._compare = lambda turn: None
for number in (2, 3):
    kills.Turn(Drill(), number, 6, 40).perform()
"""


def test_turns_do_the_same_steps_and_every_second_one_in_the_reverse_order() -> None:
    """A run, its last iteration, and its seed, or its spare nodes: without agents there are none."""
    assert printed(TURNS).splitlines() == [
        "bare-2 40 None",
        "undisturbed-2 40 6",
        "one-spare-2 40 2",
        "spares-2 40 2",
        "spares-3 40 3",
        "one-spare-3 40 3",
        "undisturbed-3 40 6",
        "bare-3 40 None",
    ]
