"""`relayrun report --serve`: all runs of a folder on loopback, for nobody else, from nowhere but the files."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.watch.report import live_server
from tests import pages
from tests.browser import Page
from tests.history import STEP, make_history
from tests.pictured import make_pictured
from tests.unit.test_report import EVIL, Structure
from tests.waiting import read_line, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of all kinds: one that is done, one that stands still, one with an evil name, one that is damaged."""
    folder = tmp_path_factory.mktemp("served") / "scratch"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder.parent}{os.pathsep}/bin")  # without Slurm's commands
        run = make_pictured(folder.parent)
        shutil.copytree(run.path.parent, folder / "ada")
        idle = make_history(folder / "ada/llama3-1b", lines=30, attempts=3)
        shutil.rmtree(idle.path / "local")
        replace(Plan.load(idle), run="ada/llama3-1b").write(idle.plan)
        shutil.copytree(idle.path, folder / "ada" / EVIL.replace("/", "∕"))
        shutil.copytree(idle.path, folder / "damaged")
        (folder / "damaged/plan.json").write_text("{")
        begun = Run(Path(shutil.copytree(idle.path, folder / "ada/not-begun")))
        shutil.rmtree(begun.attempts)
        begun.attempts.mkdir()
        (folder / "secret.txt").write_text("of nobody's concern")
        yield folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with live_server.serve_reports(folder, port=0) as (address, serving):
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield address
        serving.shutdown()
        thread.join(300)


def asked(address: str, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """The status and the text of an answer to exactly this path."""
    place, _, key = address.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(place, timeout=300)
    try:
        connection.putrequest(method, path.replace("KEY", key.strip("/")), skip_host=True)
        if host != "":
            connection.putheader("Host", place if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_list_and_a_report_behind_it(address: str) -> None:

    def shown() -> str:
        status, text = asked(address, "/KEY/")
        assert status == 200
        return text if "94.9%" in text else ""

    text = wait_for(shown, step=0.5, words="the goodput, which is reckoned beside it")
    found = Structure(text)
    for words in ("ada/llama3-8b", "6,000 of 6,000", "2.3148", "94.9%", "done: iteration 6000", "damaged", "5 runs: "):
        assert words in found.text(), words
    assert not found.tags() & {"script", "link", "img", "iframe", "form"}
    links = [attributes["href"] or "" for tag, attributes in found.seen if tag == "a"]
    assert len(links) == 5
    for link in links:
        status, text = asked(address, f"/KEY/{link}")
        report = Structure(text)
        assert not report.tags() & {"script", "link", "img", "iframe", "form"}
        if link.endswith(("damaged", "not-begun")):
            assert status == 500
            assert "no attempt" in report.text() or "plan.json" in report.text()
            continue
        assert (status, report.words["h2"][0]) == (200, "Training"), link
        home = next(attributes["href"] or "" for tag, attributes in report.seen if tag == "a")
        assert os.path.normpath(f"/KEY/{link}/../{home}") == "/KEY"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/KEY",
        "/KEYx/",
        "/key/",
        "http://[/KEY/",
        "/KEY/?page=0",
        "/KEY/?page=2",
        "/KEY/?page=x",
        "/KEY/secret.txt",
        "/KEY/run/",
        "/KEY/run/secret.txt",
        "/KEY/run/../secret.txt",
        "/KEY/run/ada/../ada/llama3-8b",
        "/KEY/run/ada/%2e%2e/ada/llama3-8b",
        "/KEY/run//etc/passwd",
        "/KEY/run/%2fetc%2fpasswd",
        "/KEY/run/..%2f..%2fllama3-8b",
        "/KEY/run/ada/llama3-8b%00",
        "/KEY/run/ada/llama3-8b/plan.json",
        "/KEY/run/" + "a/" * 5000,
    ],
)
def test_no_path_reaches_the_file_system(address: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(address, "/KEY/")[0] == 200  # the runs are known
    looked_at: list[str] = []
    for name in ("stat", "lstat", "open", "scandir", "listdir"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda path, *more, real=real, **options: looked_at.append(str(path)) or real(path, *more, **options),
        )
    status, text = asked(address, path)
    monkeypatch.undo()
    assert status == 404
    assert "nobody" not in text
    assert not [each for each in looked_at if ".." in each or "secret" in each or "passwd" in each]


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "0.0.0.0", "[::1", "a b"]
)
def test_a_page_of_another_name_is_refused(address: str, host: str) -> None:
    status, text = asked(address, "/KEY/", host=host)
    assert status in (400, 403)
    assert "llama" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST"])
def test_through_a_tunnel_it_has_another_port(address: str, host: str) -> None:
    assert asked(address, "/KEY/", host=host)[0] == 200


def test_nothing_but_reading(address: str, folder: Path) -> None:
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert asked(address, "/KEY/", method=method)[0] == 501
    assert asked(address, "/KEY/", method="HEAD") == (200, "")
    assert asked(address, "/KEY/run/ada/llama3-1b")[0] == 200
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")) == before
    port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=60)  # of this machine, too


def test_every_answer_forbids_what_it_does_not_need(address: str) -> None:
    place, _, key = address.removeprefix("http://").partition("/")
    for path in (f"/{key}", "/", f"/{key}run/none"):
        connection = http.client.HTTPConnection(place, timeout=300)
        connection.request("GET", path)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        connection.close()
        assert found["content-security-policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in found["content-security-policy"]
        assert found["referrer-policy"] == "no-referrer"
        assert found["cache-control"] == "no-store"
        assert found["x-content-type-options"] == "nosniff"


def test_a_run_that_goes_on_is_read_anew(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "SUMMARY_SECONDS", 0.0)
    run = Run(folder / "ada/llama3-1b")
    assert "of 300" in asked(address, "/KEY/")[1]
    text = run.attempt(3).metrics.read_text()
    run.attempt(3).metrics.write_text(text + STEP.format(77))
    try:
        assert "77 of 300" in asked(address, "/KEY/")[1]
        assert "77" in asked(address, "/KEY/run/ada/llama3-1b")[1]
    finally:
        run.attempt(3).metrics.write_text(text)


def test_in_a_browser(tab: Page, address: str, folder: Path) -> None:
    asked(address, "/KEY/run/ada/llama3-8b")
    for path in ("", "run/ada/llama3-8b", "run/ada/not-begun"):
        wrong = pages.complaints(tab, f"{address}{path}", own=lambda url: url.startswith(address))
        assert [each for each in wrong if "status of 500" not in each] == [], path


def test_from_the_command_line_until_ctrl_c(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "relayrun.cli", "report", str(folder), "--serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # as in a terminal: what a shell starts in the background takes no notice of Ctrl-C, nor does what that starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        address = read_line(process).strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", address)
        assert asked(address, "/KEY/")[0] == 200
        assert read_line(process).startswith("from another machine: ssh -L ")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (0, "")


def test_what_does_not_go_together_is_refused(
    folder: Path, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = address.split(":")[2].split("/")[0]
    for options, words in [
        ([str(folder), "--serve", "--json"], "--serve shows one folder"),
        ([str(folder), str(folder), "--serve"], "--serve shows one folder"),
        ([str(folder), "--port", "1"], "--port goes with --serve"),
        ([str(tmp_path / "none"), "--serve"], "there is no such folder"),
        ([str(folder), "--serve", "--port", port], f"port {port} of 127.0.0.1 cannot be listened on"),
        ([str(folder), "--serve", "--port", "70000"], "port 70000 of 127.0.0.1 cannot be listened on"),
    ]:
        assert main(["report", *options]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.alone
def test_a_thousand_runs_answer_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    folder = tmp_path / "runs"
    first = make_history(folder / "p/r0", lines=30, attempts=3)
    for number in range(1, 999):
        shutil.copytree(first.path, folder / f"p/r{number}")
        if number % 2:
            (folder / f"p/r{number}/STOP").write_text("done: all\n")
    (tmp_path / "long").mkdir()
    run = make_pictured(tmp_path / "long")
    with open(run.attempt(3).metrics, "w") as file:
        file.writelines(STEP.format(number) for number in range(3751, 1_003_751))
    shutil.move(run.path, folder / "p/long")
    with live_server.serve_reports(folder, port=0) as (address, serving):
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            before = time.process_time()
            status, text = asked(address, "/KEY/")
            seconds = time.process_time() - before
            print(f"{seconds:.2f} s of CPU, {len(text):,} bytes")
            assert status == 200
            assert "1,000 runs" in text
            assert "1,003,750" in text
            assert seconds < 1
            assert asked(address, "/KEY/run/p/long")[0] == 200
        finally:
            serving.shutdown()
            thread.join(300)


def test_the_first_answer_needs_no_process_of_its_own(folder: Path) -> None:
    """Whoever only looks at the list pays for the list: goodput is reckoned once it was answered."""
    gallery = live_server.ReportGallery(folder)
    before = set(multiprocessing.active_children())
    try:
        found = gallery.overview(1)
        assert found is not None
        text, names = found
        assert text.count("…") == 3  # those that have begun
        assert set(multiprocessing.active_children()) == before
        gallery.reckon(names)
        assert len(set(multiprocessing.active_children()) - before) == 1
        wait_for(lambda: "94.9%" in (gallery.overview(1) or ("", []))[0], step=0.2)
    finally:
        gallery.close()
    assert set(multiprocessing.active_children()) == before
