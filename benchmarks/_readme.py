#!/usr/bin/env python3
"""The README's figures of the drill of kills, from its result: they stand between two marks there."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "kills.json"
BEGIN, END = "<!-- benchmarks/_readme.py wrote this -->\n", "<!-- up to here -->\n"
COLUMNS = {
    "spares": "{}",
    "one_spare": "{}",
    "undisturbed": "undisturbed",
    "bare": "undisturbed, without agents and copies",
}
"""The runs of a turn, in the order of the table."""


def render(figures: dict[str, Any]) -> str:
    """The text for figures of `benchmarks/kills.py`; of its runs, `one_spare` and `bare` may be missing."""
    names = [name for name in COLUMNS if name in figures]
    runs = {name: [turn[name] for turn in figures["turns"]] for name in names}
    disturbed = [name for name in names if "kills" in figures[name]]

    def row(what: str, key: str, form: str, shown: list[str] = disturbed) -> tuple[str, ...]:
        return what, *(_cell(runs[name], key, form) if name in shown else "" for name in names)

    table = [
        ("", *(COLUMNS[name].format(_count(runs[name][0].get("spare_nodes", 0), "spare node")) for name in names)),
        ("---",) * (1 + len(names)),
        row("effective training time", "effective_training_time", ".1%"),
        row("seconds from the first step to the last", "seconds", ".0f", names),
        row("seconds of as many steps undisturbed", "undisturbed_seconds", ".0f"),
        row("steps", "steps", ".0f", names),
        row("median seconds of a step", "step_seconds", ".3f", names),
        row("ranks killed", "kills", ".0f"),
        row("nodes lost", "nodes_lost", ".0f"),
        row("steps done again, which count as lost", "steps_lost", ".0f"),
        row("Slurm jobs", "jobs", ".0f"),
        ("what differs from undisturbed", *(_different(runs[name]) if name in disturbed else "" for name in names)),
    ]
    model, turns = figures["model"], len(figures["turns"])
    many = f"Median of {turns} turns, smallest to largest" if turns > 1 else "There is one run of each"
    setting = (
        f"{figures['nodes']} simulated nodes with {figures['ranks']} ranks on {figures['cpus']} processors; a random "
        f"rank is killed every {figures['kill_every_seconds']:g} s, a random node every "
        f"{figures['lose_every_seconds'] / 60:g} minutes; the model has {model['num_layers']} layers of width "
        f"{model['hidden_size']}. *Effective training time* is the seconds of the same steps undisturbed over the "
        f"run's own. {many}; the machine had other work too (load average {figures['load_average']:.0f}):"
    )
    lines = [*textwrap.wrap(setting, 118), "", *(f"| {' | '.join(cells)} |" for cells in table)]
    return "\n".join(lines) + "\n"


def _cell(runs: list[dict[str, Any]], key: str, form: str) -> str:
    values = [run[key] for run in runs]
    ends = [f"{value:{form}}" for value in (statistics.median(values), min(values), max(values))]
    text = ends[0] if min(values) == max(values) else "{} ({} to {})".format(*ends)
    by_mean = key in ("undisturbed_seconds", "effective_training_time") and runs[0].get("undisturbed_seconds_by_mean")
    return f"about {text}" if by_mean else text


def _different(runs: list[dict[str, Any]]) -> str:
    found = sorted({name for run in runs for name, lines in run["differences"].items() if lines})
    return ", ".join(found) or "no bit of losses, weights or samples"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def written(page: str) -> str:
    """The page with the text of the newest result between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    return before + BEGIN + "\n" + render(result["figures"] | {"cpus": result["cpus"]}) + "\n" + END + after


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(README)
