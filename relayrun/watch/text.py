"""Text for people and programs: durations, times and JSON."""

from __future__ import annotations

import json
import math
import time
from typing import Any


def json_text(value: Any) -> str:
    """Return JSON; NaN and infinity become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def format_optional(value: float | None, form: str) -> str:
    """Format a number, such as a loss by `.4f`; empty for None."""
    return "" if value is None else format(value, form)


def format_seconds(seconds: float | None) -> str:
    """Format a duration roughly: `45 s`, `12 min`, `3.4 h`, `2.1 days`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def format_exact_seconds(seconds: float) -> str:
    """Format a duration in full: `4.2 s`, `3 min 20 s`, `5 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def format_time(seconds: float, *, zone: bool = False) -> str:
    """Format seconds since 1970 in the local time zone, with the zone's name if `zone`."""
    return time.strftime("%Y-%m-%d %H:%M:%S" + " %Z" * zone, time.localtime(seconds))
