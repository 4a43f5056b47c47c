"""Slurm's form of a duration."""

from __future__ import annotations


def parse_time(text: str) -> int:
    """Convert `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS` to seconds, as `sbatch --time` reads them.
    Raises ValueError."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if (dash and not days.isdecimal()) or not all(part.isdecimal() for part in parts) or len(parts) > 3:
        raise ValueError(f"{text!r} is no Slurm time; write MM, HH:MM:SS or D-HH:MM:SS")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def format_time(seconds: int) -> str:
    """Format seconds as `D-HH:MM:SS`."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"{day}-{hour:02}:{minute:02}:{second:02}"
