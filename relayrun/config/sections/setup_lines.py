"""Whether Bash can read the lines that a config gives it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from relayrun.errors import ConfigError


def check_setup_lines(lines: Sequence[str], *, where: str) -> None:
    """Raise ConfigError, with Bash's own words, for lines that are no Bash. Nothing of them runs."""
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    read = subprocess.run(["bash", "-n", "-s"], input=text, capture_output=True, text=True, check=False)
    if read.returncode:
        said = read.stderr.strip().splitlines()[0].partition(": ")[2]
        raise ConfigError(f"Bash cannot read these lines: {said}", where=where, hint="each line is one of a script")
