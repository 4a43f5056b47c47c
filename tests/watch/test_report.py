"""`relayrun report`: a page, and the attempts of a run as a table."""

from __future__ import annotations

import colorsys
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from relayrun.cli import main, parse
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.files import append_line
from relayrun.watch.report import page
from relayrun.watch.report.chart import axis_ticks, reduce_points
from relayrun.watch.report.report_data import read_report_data
from relayrun.watch.status import queue
from tests.accounted import T, make_project
from tests.history import STEP, make_history

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/report.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_history(tmp_path_factory.mktemp("report") / "run", lines=30, attempts=3)


def test_the_table_in_the_terminal(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--text"]) == 0
    out = capsys.readouterr().out
    assert "attempts of run" in out
    for iterations in ("1–10", "11–20", "21–30"):
        assert iterations in out
    assert not list(Path.cwd().glob("*.html"))


def test_an_attempt_that_trained_nothing_says_so(run: Run, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(run.path, tmp_path / "run", symlinks=True)))
    copy.attempt(3).metrics.unlink()
    rows = read_report_data(copy).attempts
    assert [row.steps for row in rows] == [(1, 10), (11, 20), None]


def test_an_attempt_without_an_end_is_drawn_to_its_last_sign_if_slurm_has_forgotten_it(accounted: Run) -> None:
    accounted.attempt(2).end.unlink()
    accounted.attempt(2).outcome.unlink()
    assert read_report_data(accounted).attempts[1].seconds is None  # it may run
    write_stop(accounted, ChainEnd("stopped", "cancelled by root"))
    row, attempt = read_report_data(accounted).attempts[1], accounted.attempt(2)
    begin = attempt.read_begin()
    assert begin is not None
    assert (row.cause, row.seconds) == ("unknown", attempt.read_commits()[-1].time - begin.start_time)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_the_whole_table(run: Run, encoding: str) -> None:
    command = [sys.executable, "-m", "relayrun", "report", str(run.path), "--text"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    assert "attempts of run" in done.stdout.decode(encoding)


def test_a_run_that_has_not_begun_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_history(tmp_path / "run", lines=10, attempts=1)
    shutil.rmtree(run.attempt(1).path)
    for options in ([], ["--text"]):
        assert main(["report", str(run.path), *options]) == 1
        assert "no attempt of this run has begun" in capsys.readouterr().err


# --- the page


class Structure(HTMLParser):
    """The elements of a page; an element that is not closed raises an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for name in set(self.open):
            self.words.setdefault(name, []).append(data)

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.seen}

    def text(self, tag: str = "body") -> str:
        return "".join(self.words.get(tag, []))


EVIL = "<script>alert('x')</script>\"&"


@pytest.fixture
def accounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run without Slurm's commands, so that the chain's own times hold."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def test_a_page_holds_all_that_it_shows_and_no_script(accounted: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "my-project/my-run"]) == 0
    assert capsys.readouterr().out == "report-my-run.html\n"
    text = Path("report-my-run.html").read_text(encoding="utf-8")
    page = Structure(text)
    assert not page.tags() & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    names = {name for _, attributes in page.seen for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "srcset", "action")}
    links = {attributes["href"] for _, attributes in page.seen if "href" in attributes}
    assert links == {f"#{attributes['id']}" for tag, attributes in page.seen if tag == "section"}
    assert not re.findall(r"url\(|@import|https?:", text)
    headings = ["Training", "Attempts", "Failures", "Goodput", "Data", "Evaluations", "Checkpoints", "Configuration"]
    assert page.words["h2"] == headings
    for words in ("made by hand", "n1", "goodput23.9%", "iteration10 of 10", "held-out 2.5000", "redone", "in all"):
        assert words in page.text(), words
    titles = page.words["title"]
    assert "attempt 2 from iteration 6; the one before: failed" in titles
    assert any(re.fullmatch(r"iteration 10: training [\d.]+, held-out 2.5", title) for title in titles), titles
    assert {"loss", "learning rate", "throughput", "memory", "gradient norm"} <= set(page.words["b"])
    viewport = [attributes["content"] for tag, attributes in page.seen if attributes.get("name") == "viewport"]
    assert viewport == ["width=device-width, initial-scale=1"]
    for words in ("prefers-color-scheme:dark", "@media print", "max-width:1000px"):
        assert words in page.text("style"), words


def test_a_page_shows_the_overlap_that_the_check_measured(accounted: Run) -> None:
    accounted.overlap.write_text(f"validation {EVIL!r}: 1 of 9 documents and 12.00% of their 13-grams stand in 50\n")
    assert main(["report", "my-project/my-run"]) == 0
    page = Structure(Path("report-my-run.html").read_text(encoding="utf-8"))
    assert "1 of 9 documents and 12.00% of their 13-grams" in page.text()
    assert "script" not in page.tags()


def test_red_is_for_failures_alone() -> None:
    """Hues near red, in light, dark and print."""
    style = (Path(page.__file__).parent / "templates/style.css").read_text(encoding="utf-8")
    found = re.findall(r"--(\w+):#(\w{2})(\w{2})(\w{2})", style)
    assert len(found) == 3 * (6 + 8 + 9)
    groups = {css: name for name, _, css in page.PART_GROUPS}
    red = set()
    for name, *channels in found:
        hue, _, strength = colorsys.rgb_to_hls(*(int(each, 16) / 255 for each in channels))
        if strength > 0.3 and min(hue, 1 - hue) < 25 / 360:
            red.add(groups.get(name, name))
    assert red == {"bad", "lost"}


def test_whatever_a_run_is_called_its_name_is_text(tmp_path: Path, accounted: Run) -> None:
    plan = Plan.load(accounted)
    replace(plan, run=EVIL).write(accounted.plan)
    end = accounted.attempt(1).read_end()
    assert end is not None
    replace(end, reason=EVIL, cause=EVIL).write(accounted.attempt(1).end)
    line = {"iteration": 10, "validation": {EVIL: 2.0}, "evaluation_seconds": 1.0, "time": T + 336.0}
    append_line(accounted.attempt(2).metrics, line)
    accounted.stop.write_text(EVIL)
    accounted.config.mkdir(exist_ok=True)
    (accounted.config / "0001.yaml").write_text(EVIL)
    (accounted.config / "0002.yaml").write_text(EVIL)
    evil = Run(accounted.path.rename(accounted.path.with_name("<b onclick=x>")))
    assert main(["report", str(evil.path), str(evil.path), "--html", "evil.html"]) == 0
    page = Structure(Path("evil.html").read_text(encoding="utf-8"))
    assert not page.tags() & {"script", "b onclick=x"}
    assert not any("onclick" in attributes for _, attributes in page.seen)
    assert page.text("h1").count(EVIL) == 2
    assert page.text("pre").count(EVIL) == 2
    assert page.text("td").count(EVIL) >= 4


def test_the_commands_of_the_page_about_reports(accounted: Run, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(accounted.path, accounted.path.with_name("other-run"))
    patterns = (r"^```bash\n(.*?)^```$", r"^\*/10 .*?bin/relayrun (.*?)$", r"^\| (\w+) \| ")
    (text,), (renewed,), tables = (re.findall(pattern, PAGE, re.M | re.S) for pattern in patterns)
    one, two, printed = (shlex.split(line)[1:] for line in text.splitlines())
    assert main(one) == main(two) == 0
    assert capsys.readouterr().out == "report-my-run.html\nboth.html\n"
    both = Structure(Path("both.html").read_text(encoding="utf-8"))
    assert both.words["h1"] == ["my-project/my-run", "my-project/my-run"]
    assert tables[1:] == both.words["h2"][:8]
    assert parse(printed).text
    assert parse(shlex.split(renewed)).html == Path("$HOME/public/my-run.html")
    found = read_report_data(accounted)
    assert (found.series["loss"].x.tolist(), found.series["loss"].y.tolist()) == (
        [float(n) for n in range(1, 11)],
        [10 - 0.5 * n for n in range(1, 11)],
    )
    assert [(name, each.x.tolist(), each.y.tolist()) for name, each in found.validation.items()] == [
        ("held-out", [10.0], [2.5])
    ]
    assert [row.steps for row in found.attempts] == [(1, 5), (6, 10)]
    assert [(row.dataset, row.samples, row.epochs) for row in found.data] == [("code", 5, 0.25), ("prose", 5, 1.25)]
    assert [list(each.blamed) for each in found.account.allocations] == [["n1"], []]


def test_every_pixel_keeps_its_least_and_its_greatest_value() -> None:
    x = np.arange(1.0, 100_001.0)
    y = np.sin(x / 5000)
    y[[777, 50_000, 99_998]] = [9.0, -9.0, np.nan]
    y[12_345] = np.inf
    found = reduce_points(x, y, pixels=100)
    assert found.size <= 202
    assert found.x[[0, -1]].tolist() == [1.0, 100_000.0]  # charts of one run have one axis
    assert (np.diff(found.x) > 0).all()
    assert found.left_out == 2
    assert {9.0, -9.0} <= set(found.y.tolist())
    assert reduce_points(x[:150], y[:150], pixels=100).size == 150


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (1, 400, [100, 200, 300, 400]),
        (2.5, 2.5, [2.5]),
        (0.0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (-1.2, 0.9, [-1, -0.5, 0, 0.5]),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, found: list[float]) -> None:
    assert axis_ticks(low, high, 4) == pytest.approx(found)


def test_iterations_are_whole() -> None:
    assert axis_ticks(1, 10, 4, whole=True) == [2, 4, 6, 8, 10]
    assert axis_ticks(1, 2, 4, whole=True) == [1, 2]


@pytest.mark.long
@pytest.mark.alone
def test_a_million_iterations_take_less_than_ten_seconds_and_five_megabytes(accounted: Run) -> None:
    attempt = accounted.attempt(2)
    end, at = attempt.read_end(), T + 295.0
    assert end is not None
    with open(attempt.metrics, "w") as file:
        for number in range(6, 1_000_006):
            at += 5.1
            file.write(STEP.format(number).replace("1763790000.123", f"{at:.3f}"))
    replace(end, end_time=at + 3, durable_iteration=1_000_005).write(attempt.end)
    before = time.process_time()
    assert main(["report", str(accounted.path), "--html", "long.html"]) == 0
    seconds, size = time.process_time() - before, Path("long.html").stat().st_size
    print(f"{seconds:.1f} s of CPU, {size / 1e6:.2f} MB")
    assert size < 5_000_000
    assert seconds < 10
