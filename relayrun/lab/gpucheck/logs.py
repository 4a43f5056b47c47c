"""What the log of a program says of its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from relayrun.files import last_lines


def last_log_line(path: Path) -> str:
    """Return the last line of a log that says something."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1] if lines else "nothing"


def log_tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, for a person who cannot open it."""
    try:
        text, size = last_lines(path, lines)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not size and not path.exists():
        return f"{path}: {os.strerror(errno.ENOENT)}"
    return "\n".join([f"== {path}", *text.decode(errors="replace").splitlines()])


def log_error(log_file: Path, code: int) -> str:
    """Return the error of a program, from its log: what stands behind its last `error:`, or else its last line."""
    try:
        text = log_file.read_text(errors="replace")
    except OSError:
        text = ""
    at = text.rfind("error: ")
    if at >= 0 and (at == 0 or text[at - 1] == "\n"):
        return " ".join(text[at + len("error: ") :].split())[:1500]
    return f"{last_log_line(log_file)} (exit code {code}, {log_file})"
