"""Faults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    room: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS: tuple[Fault, ...] = ()
