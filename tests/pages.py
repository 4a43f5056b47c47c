"""What every page must be, on a phone and on a wide screen, by day and by night."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from tests import browser
from tests.browser import Page

WIDTHS = (400, 1600)
BETWEEN = (320, 820, 1024)


def complaints(page: Page, url: str, *, own: Callable[[str], bool]) -> list[str]:
    """Open an address at all widths, light and dark and as it is printed; return all that is wrong with it.

    `own`: whether the page may ask for an address.
    """
    found = []
    for width, scheme, media in [
        *((width, scheme, "screen") for width in WIDTHS for scheme in ("light", "dark")),
        *((width, "light", "screen") for width in BETWEEN),
        (800, "dark", "print"),
    ]:
        seen = page.show(url, width=width, scheme=scheme, media=media)
        wrong = [f"asks for {request}" for request in seen.requests if not own(request)]
        wrong += seen.complaints
        wrong += page.evaluate(browser.OVERFLOW) if media == "screen" else []
        contrast = page.evaluate(browser.CONTRAST)
        wrong += contrast["found"] + ["there is no text"] * (not contrast["texts"])
        found += [f"{width} {scheme} {media}: {each}" for each in wrong]
    return found


def keep_picture(data: bytes, path: Path) -> None:
    """Write a screenshot with a palette of its own: a third of its bytes, and no difference to the eye."""
    Image.open(io.BytesIO(data)).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
