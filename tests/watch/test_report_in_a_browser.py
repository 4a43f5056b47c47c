"""Reports in headless Chromium. UPDATE_PICTURES=1 draws the pictures of docs/how-to/report.md anew."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.run import Run
from relayrun.watch.report.page import report_page
from relayrun.watch.report.report_data import RunReportData, read_report_data
from tests import pages
from tests.browser import Page
from tests.history import STEP
from tests.pictured import T, make_pictured

PICTURES = Path(__file__).resolve().parents[2] / "docs/pictures"

MADE_UP = "Made up, to show the page: no such run has happened."
"""Stands in every page of which the docs have a picture, at its top."""
BANNER = f"<p class='bad' style='border:2px solid;padding:.4rem .8rem;font-weight:bold'>{MADE_UP}</p>"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[RunReportData]:
    """Two runs of three attempts, as if they lay on a cluster's scratch."""
    folder = tmp_path_factory.mktemp("pictured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}/bin")  # without Slurm's commands the chain's own times hold
        runs = [
            make_pictured(folder, name="made-up/llama3-8b"),
            make_pictured(folder, name="made-up/llama3-8b-warm", above=2.0, seed=2),
        ]
        return [replace(read_report_data(run), run=Run(Path("/scratch/made-up/runs") / run.path.name)) for run in runs]


def made_up(text: str) -> str:
    """The page with the banner."""
    return text.replace("<body>", f"<body>{BANNER}", 1)


def draw(tab: Page, name: str, height: int) -> None:
    """Keep a picture of the page that stands there, if somebody asks for it, with the words at its top."""
    says = tab.evaluate("document.body.innerText").splitlines()[0]
    assert says == MADE_UP
    if os.environ.get("UPDATE_PICTURES"):
        pages.keep_picture(tab.picture(height=height), PICTURES / name, says=says)


def wrong(tab: Page, path: Path, text: str) -> list[str]:
    """All that is wrong with a page of this text; it asks for nothing but itself."""
    path.write_text(text, encoding="utf-8")
    return pages.complaints(tab, path.as_uri(), own=lambda url: url == path.as_uri())


def test_a_run_of_three_attempts(tab: Page, two: list[RunReportData], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert wrong(tab, path, made_up(report_page(two[:1], now=T + 400_000))) == []
    words = tab.evaluate("document.body.innerText")
    for each in ("ranks started again", "uncorrectable ECC error", "nid001019", "checkpoint.interval: 500 -> 250"):
        assert each in words, each
    assert tab.evaluate("document.querySelectorAll('line.restart').length") == 6
    tab.show(path.as_uri(), width=1200)
    draw(tab, "report.png", 1550)
    tab.show(path.as_uri(), width=400, scheme="dark")
    draw(tab, "report-phone.png", 1550)


def test_names_and_words_without_a_space(tab: Page, two: list[RunReportData], tmp_path: Path) -> None:
    long = "without-a-space-" * 20
    account = replace(two[0].account, plan=replace(two[0].account.plan, run=long))
    entry = replace(two[0], account=account, config=long, run=Run(Path("/") / long[:200] / long[:200]))
    entry = replace(
        entry, validation={long: two[0].validation["held-out web"]}, status=replace(entry.status, stop=long)
    )
    assert wrong(tab, tmp_path / "long.html", report_page([entry, entry], now=T)) == []


@pytest.mark.long
def test_a_million_iterations(tab: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    run = make_pictured(tmp_path)
    attempt = run.attempt(3)
    with open(attempt.metrics, "w") as file:
        file.writelines(STEP.format(number) for number in range(3751, 1_003_751))
    target = tmp_path / "long.html"
    assert main(["report", str(run.path), "--html", str(target)]) == 0
    assert wrong(tab, target, target.read_text(encoding="utf-8")) == []


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
"""The faults put into a page, and the words about each."""


def test_what_is_wrong_is_found(tab: Page, two: list[RunReportData], tmp_path: Path) -> None:
    text = report_page(two[:1], now=T).replace("<main>", f"<main>{''.join(PLANTED)}", 1)
    assert text.count("Content-Security-Policy") == 1
    complaints = wrong(tab, tmp_path / "planted.html", text.replace("Content-Security-Policy", "none"))
    for planted, found in PLANTED.items():
        assert any(found in each for each in complaints), planted


def test_the_policy_of_the_page_keeps_it_from_the_network(tab: Page, two: list[RunReportData], tmp_path: Path) -> None:
    path = tmp_path / "planted.html"
    text = report_page(two[:1], now=T).replace("<main>", "<main><img src='http://127.0.0.1:9/x.png'>", 1)
    path.write_text(text, encoding="utf-8")
    seen = tab.show(path.as_uri(), width=400)
    assert any("Content Security Policy" in each for each in seen.complaints)


def test_the_pictures_of_the_docs_are_small_and_say_that_their_runs_are_made_up() -> None:
    from PIL import Image  # conftest.py imports this module

    found = sorted(PICTURES.glob("report*.png"))
    assert {path.name for path in found} >= {"report.png", "report-phone.png"}
    assert all(path.stat().st_size < 150_000 for path in found)
    for path in found:
        with Image.open(path) as picture:
            assert picture.info.get("Description") == MADE_UP, path.name
