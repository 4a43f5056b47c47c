"""The figures in docs/reference/data-order-figures.md are those of the last benchmark, and keep the claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "data_order.json").read_text())["figures"]


def spread(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}}–{values['max']:{form}})"


def megatron(row: dict[str, Any]) -> str:
    return ", ".join(
        f"10^{len(str(one['tokens'])) - 1}: "
        + ("not possible here" if "failed" in one else f"{one['seconds']:.1f} s, {one['added_megabytes']:,.0f} MB")
        for one in row["megatron"]
    )


def lines() -> list[str]:
    """The lines of the tables."""
    made = [
        f"| {row['seq_length']} | {'yes' if row['resets_and_eod_mask'] else 'no'} "
        f"| {row['batches_per_second']['relayrun']['median']:,.0f} "
        f"| {row['batches_per_second'][row['megatron_best']]['median']:,.0f} | {spread(row['ratio'], '.1f')} |"
        for row in FIGURES["throughput"]
    ]
    made += [
        f"| 10^{len(str(row['documents'])) - 1} | {row['freeze_once']['seconds']:.1f} s "
        f"| {spread(row['open_seconds'], '.2f')} s | {row['open_peak_megabytes']['max']:.0f} MB | {megatron(row)} |"
        for row in FIGURES["opening"]
    ]
    shuffle = FIGURES["shuffle"]
    made += [
        f"| {name} | {shuffle[name]['lag_1_correlation']:.4f} | {shuffle[name]['batch_mean_variance_ratio']:.2f} |"
        for name in ("none", "relayrun")
    ]
    return made


def test_the_tables_are_those_of_the_benchmark() -> None:
    text = (ROOT / "docs" / "reference" / "data-order-figures.md").read_text()
    missing = [line for line in lines() if line not in text]
    assert not missing, "\n".join(missing)


def test_the_claims_hold_in_the_figures() -> None:
    for row in FIGURES["throughput"]:
        assert row["ratio"]["median"] >= {512: 2.0, 4096: 1.3}[row["seq_length"]]
    for row in FIGURES["opening"]:
        assert row["open_seconds"]["max"] < 1
        assert row["open_peak_megabytes"]["max"] < 100
    shuffle = FIGURES["shuffle"]
    assert abs(shuffle["relayrun"]["lag_1_correlation"]) < shuffle["bound_lag_1"]
    assert shuffle["relayrun"]["batch_mean_variance_ratio"] < 1.2
    assert FIGURES["memory_growth"]["growth_megabytes"] < 5
