#!/usr/bin/env python3
"""The README's figures of the drill of kills, from its result: they stand between two marks there."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "kills.json"
BEGIN, END = "<!-- benchmarks/_readme.py wrote this -->\n", "<!-- up to here -->\n"


def render(figures: dict[str, Any]) -> str:
    """The text for figures of `benchmarks/kills.py`; a run with fewer spare nodes than were lost may be missing."""
    disturbed = [figures[name] for name in ("spares", "one_spare") if name in figures]
    runs = [*disturbed, figures["undisturbed"]]
    table = [
        ("", *(_count(run["spare_nodes"], "spare node") for run in disturbed), "undisturbed"),
        ("---",) * (1 + len(runs)),
        ("effective training time", *(f"{run['effective_share']:.1%}" for run in disturbed), ""),
        ("steps", *(str(run["steps"]) for run in runs)),
        ("seconds from the first to the last", *(f"{run['seconds']:.0f}" for run in runs)),
        ("median seconds of a step", *(f"{run['step_seconds']:.3f}" for run in runs)),
        ("ranks killed, nodes lost", *(f"{run['kills']}, {run['nodes_lost']}" for run in disturbed), ""),
        ("steps done again, which count as lost", *(str(run["steps_lost"]) for run in disturbed), ""),
        ("Slurm jobs", *(str(run["jobs"]) for run in disturbed), "1"),
        ("what differs from undisturbed", *(_different(run) for run in disturbed), ""),
    ]
    model = figures["model"]
    setting = (
        f"{figures['nodes']} simulated nodes with {figures['ranks']} ranks on {figures['cpus']} processors, for "
        f"{figures['minutes']:g} minutes; a random rank is killed every {figures['kill_every_seconds']:g} s, a random "
        f"node every {figures['lose_every_seconds'] / 60:g} minutes; the model has {model['num_layers']} layers of "
        f"width {model['hidden_size']}:"
    )
    lines = [*textwrap.wrap(setting, 118), "", *(f"| {' | '.join(row)} |" for row in table)]
    return "\n".join(lines) + "\n"


def _different(run: dict[str, Any]) -> str:
    found = [name for name, lines in run["differences"].items() if lines]
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
