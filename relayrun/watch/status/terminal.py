"""Tables on a terminal, and in files and pipes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_table(table: Table) -> None:
    """Print a table; into a file or pipe without folding at a terminal's width."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=400)
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip())
