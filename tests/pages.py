"""What every page must be, on a phone and on a wide screen, by day and by night."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import browser
from tests.browser import Page

WIDTHS = (400, 1600)
BETWEEN = (320, 820, 1024)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """A tab of a browser; where there is none the test fails, unless somebody goes without."""
    if browser.program() is None and os.environ.get("RELAYRUN_NO_BROWSER") == "1" and os.environ.get("CI") != "true":
        pytest.skip("RELAYRUN_NO_BROWSER=1")
    with browser.running() as running:
        yield running.page()


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


def keep_picture(data: bytes, path: Path, *, says: str) -> None:
    """Write a screenshot with a palette of its own: a third of its bytes, and no difference to the eye.

    `says`: words of the page, which the file has as its description, too.
    """
    from PIL import Image, PngImagePlugin  # conftest.py imports this module

    about = PngImagePlugin.PngInfo()
    about.add_text("Description", says)
    Image.open(io.BytesIO(data)).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(
        path, optimize=True, pnginfo=about
    )
