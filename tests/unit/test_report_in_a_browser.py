"""Reports in headless Chromium. UPDATE_PICTURES=1 draws the pictures of docs/report.md anew."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.monitoring.page.document import document
from relayrun.monitoring.page.gather import RunPage, read_page
from relayrun.rundir.run import Run
from tests import browser, pages
from tests.browser import Page
from tests.history import STEP
from tests.pictured import T, make_pictured

PICTURES = Path(__file__).resolve().parents[2] / "docs/pictures"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A tab of a browser; where there is none the test fails, unless somebody goes without."""
    if browser.program() is None and os.environ.get("RELAYRUN_NO_BROWSER") == "1" and os.environ.get("CI") != "true":
        pytest.skip("RELAYRUN_NO_BROWSER=1")
    with browser.running() as running:
        yield running.page()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[RunPage]:
    """Two runs of three attempts, as if they lay on a cluster's scratch."""
    folder = tmp_path_factory.mktemp("pictured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}/bin")  # without Slurm's commands the chain's own times hold
        runs = [
            make_pictured(folder),
            make_pictured(folder, name="ada/llama3-8b-warm", above=2.0, seed=2),
        ]
        return [replace(read_page(run), run=Run(Path("/scratch/ada/logs/runs") / run.path.name)) for run in runs]


def wrong(page: Page, path: Path, text: str) -> list[str]:
    """All that is wrong with a page of this text; it asks for nothing but itself."""
    path.write_text(text, encoding="utf-8")
    return pages.complaints(page, path.as_uri(), own=lambda url: url == path.as_uri())


def test_a_run_of_three_attempts(page: Page, two: list[RunPage], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert wrong(page, path, document(two[:1], now=T + 400_000)) == []
    words = page.evaluate("document.body.innerText")
    for each in ("ranks started again", "uncorrectable ECC error", "nid001019", "checkpoint.interval: 500 -> 250"):
        assert each in words, each
    assert page.evaluate("document.querySelectorAll('line.round').length") == 6
    if os.environ.get("UPDATE_PICTURES"):
        page.show(path.as_uri(), width=1200)
        pages.keep_picture(page.picture(height=1500), PICTURES / "report.png")
        page.show(path.as_uri(), width=400, scheme="dark")
        pages.keep_picture(page.picture(height=1500), PICTURES / "report-phone.png")


def test_two_runs_side_by_side(page: Page, two: list[RunPage], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert wrong(page, path, document(two, now=T + 400_000)) == []
    if os.environ.get("UPDATE_PICTURES"):
        page.show(path.as_uri(), width=1200, scheme="dark")
        pages.keep_picture(page.picture(height=640), PICTURES / "report-two.png")


def test_names_and_words_without_a_space(page: Page, two: list[RunPage], tmp_path: Path) -> None:
    long = "without-a-space-" * 20
    account = replace(two[0].account, name=long)
    entry = replace(two[0], account=account, config=long, stop=long, run=Run(Path("/") / long[:200] / long[:200]))
    entry = replace(entry, validation={long: two[0].validation["held-out web"]})
    assert wrong(page, tmp_path / "long.html", document([entry, entry], now=T)) == []


@pytest.mark.long
def test_a_million_iterations(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    run = make_pictured(tmp_path)
    attempt = run.attempt(3)
    with open(attempt.metrics, "w") as file:
        file.writelines(STEP.format(number) for number in range(3751, 1_003_751))
    target = tmp_path / "long.html"
    assert main(["report", str(run.path), "--html", str(target)]) == 0
    assert wrong(page, target, target.read_text(encoding="utf-8")) == []


PLANTED = {
    "<p style='width:500px'>wide</p>": "p. wide: from",
    "<p style='width:50px;white-space:nowrap'>more than fits</p>": "p. more than fits: holds",
    "<p style='color:#aaa;background:#fff'>pale</p>": "pale: 2.32",
    "<p style='color:#444'>by day alone</p>": "400 dark screen: by day alone",
    "<img src='http://127.0.0.1:9/x.png'>": "asks for http://127.0.0.1:9/x.png",
    "<script>console.warn('hm')</script>": "hm",
    "<script>nothing()</script>": "nothing is not defined",
    "<div class='x' style='height:1em'><span>100</span><span style='left:3px'>200</span></div>": "100 and 200 overlap",
}
"""What is put into a page, and what is said of it."""


def test_what_is_wrong_is_found(page: Page, two: list[RunPage], tmp_path: Path) -> None:
    text = document(two[:1], now=T).replace("<main>", f"<main>{''.join(PLANTED)}", 1)
    assert text.count("Content-Security-Policy") == 1
    complaints = wrong(page, tmp_path / "planted.html", text.replace("Content-Security-Policy", "none"))
    for planted, found in PLANTED.items():
        assert any(found in each for each in complaints), planted


def test_the_policy_of_the_page_keeps_it_from_the_network(page: Page, two: list[RunPage], tmp_path: Path) -> None:
    path = tmp_path / "planted.html"
    text = document(two[:1], now=T).replace("<main>", "<main><img src='http://127.0.0.1:9/x.png'>", 1)
    path.write_text(text, encoding="utf-8")
    seen = page.show(path.as_uri(), width=400)
    assert any("Content Security Policy" in each for each in seen.complaints)


def test_the_pictures_of_the_docs_are_small() -> None:
    found = sorted(PICTURES.glob("report*.png"))
    assert {path.name for path in found} >= {"report.png", "report-phone.png", "report-two.png"}
    assert all(path.stat().st_size < 150_000 for path in found)
