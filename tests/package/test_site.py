"""The site that `make docs` builds, in headless Chromium: search, links, widths. UPDATE_PICTURES=FOLDER keeps them."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.browser import Page
from tests.pages import WIDTHS
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long

SEARCHES = {"time limit": "explanation/chain", "OOM": "how-to/why", "resume with fewer nodes": "how-to/spare-nodes"}
"""What people search for, and a page that has to be among the first ten."""
LOOKED_AT = ("index", "tutorial/from-text-to-a-model", "how-to/check", "how-to/report", "reference/settings-list")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "docs", f"SITE={folder}"], cwd=ROOT, check=True)
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("words", SEARCHES)
def test_a_search_finds_the_page(words: str, address: str, tab: Page) -> None:
    tab.show(f"{address}/index.html?q={quote(words)}", width=1600)
    links = "[...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"
    wait_for(lambda: tab.evaluate(links))
    pages = list(dict.fromkeys(re.sub(r"[?#].*", "", link) for link in tab.evaluate(links)))
    found = [page.removeprefix(f"{address}/").removesuffix(".html") for page in pages]
    assert SEARCHES[words] in found[:10]


def dead_links(site: Path) -> list[str]:
    """Links of all pages that lead to no file of the site, or to no place in a page."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="?([^" >]+)', text)) for path, text in texts.items()}
    dead = []
    for path, text in texts.items():
        for link in re.findall(r'\b(?:href|src)="?([^" >]+)', text):
            name, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", name) or path.name == "404.html":
                continue
            target = Path(os.path.normpath(path.parent / name)) if name else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in ids and anchor not in ids[target]):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_no_link_is_dead(site: Path, tmp_path: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 140
    assert dead_links(site) == []
    page = '<h1 id="a"></h1><a href="#a">, <a href="#b">, <a href="gone.html">, <a href="https://example.org">'
    (tmp_path / "page.html").write_text(page)
    assert dead_links(tmp_path) == ["page.html: #b", "page.html: gone.html"]


def test_markdown_is_read_as_it_is_meant(site: Path) -> None:
    """Python-Markdown wants an empty line before a list or a table, and one word behind a fence; GitHub does not."""
    wrong = {}
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|script)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S)
        if found := re.findall(r"^(?:<p>)?(?:[-*] |\d\. |\| ?-|```).*", text, re.M):
            wrong[str(path.relative_to(site))] = found[0][:80]
    assert wrong == {}


@pytest.mark.parametrize("page", LOOKED_AT)
def test_a_page_fits_a_phone_and_a_wide_screen(page: str, address: str, tab: Page) -> None:
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            seen = tab.show(f"{address}/{page}.html", width=width, scheme=scheme)  # type: ignore[arg-type]
            assert seen.complaints == []
            assert [each for each in seen.requests if not each.startswith((address, "data:"))] == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("document.querySelector('article p').getBoundingClientRect().width") > width / 3
            assert (
                float(tab.evaluate("parseFloat(getComputedStyle(document.querySelector('article p')).fontSize)")) >= 15
            )
            ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 384) == (scheme == "dark")
            if folder := os.environ.get("UPDATE_PICTURES"):
                picture = Path(folder, f"{page.replace('/', '-')}-{width}-{scheme}.png")
                picture.write_bytes(tab.picture(height=1400))
