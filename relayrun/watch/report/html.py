"""HTML pages from the templates beside this module: one file, without scripts and network access.

All text of a run is escaped, so its name stays text. A content policy forbids scripts and network access. The style
sheet serves narrow and wide screens, light and dark, and paper.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from relayrun.terminal import parse_column_header

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent / "templates")
    made = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"column": parse_column_header, "percent": "{:.2%}".format}
    return made


def render_page(template: str, **values: object) -> str:
    """Return the whole page of a template with these values."""
    return _environment().get_template(template).render(values)
