"""All runs of a folder as pages on loopback, read from their files when somebody asks.

    GET /KEY/            the list of runs, those that last changed first; ?page=2 has the next hundred
    GET /KEY/run/NAME    the report of the run with this path below the folder

Nothing else is answered, and nothing is written. KEY is made when the server starts: other users of the same machine
reach its loopback, too. A NAME is looked up among the runs that the list has; it never becomes a path. A request whose
Host is no name of loopback is refused: a page elsewhere, whose name was bound to 127.0.0.1, must not read this one.

Reports and goodput are made by processes of their own, so that the list answers while a long run is read. They begin
when the first is asked for; goodput is reckoned once the list was answered, and stands in the next answer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from relayrun.control.rundir.find_runs import find_runs_below
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RelayrunError
from relayrun.watch.report import overview
from relayrun.watch.report.shell import CONTENT_POLICY
from relayrun.watch.report.worker import ReportWorker
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.standing import DamagedRun, RunSummary

if TYPE_CHECKING:
    from relayrun.watch.status.run_status import RunStatus

S = TypeVar("S", bound="Standing | Damaged")

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HOST_HEADER = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
"""Names under which loopback is asked for; the port may be another one, that of a tunnel."""
FOLDER_DEPTH = 4
"""Runs lie at most so many folders below the one that is shown."""
SUMMARY_SECONDS = 5.0
"""So long an answer holds for all who ask."""
REPORT_SECONDS = 300.0
"""So long the goodput of a run that goes on holds."""
RUNS_PER_PAGE = 100
"""Runs on one page of the list: only these are looked at."""
WORKER_SECONDS = 300.0
"""Seconds until a report that is not made is given up."""
REPORT_REFRESH_SECONDS = 120
"""After so long a browser asks again for the report of a run that goes on."""
RESPONSE_HEADERS = {
    "Content-Security-Policy": f"{CONTENT_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass
class _CachedPage:
    """Something that was made of a run, or is being made."""

    of: tuple[object, ...]
    """What told of changes then."""
    since: float
    made: Future[str]
    before: str = ""
    """What was known of it until then."""

    def now(self) -> str:
        """What is known now, without waiting."""
        return self.made.result() if self.made.done() and not self.failed else self.before

    @property
    def failed(self) -> bool:
        """Whether it could not be made: another try may."""
        return self.made.done() and self.made.exception() is not None


class ReportGallery:
    """The runs of a folder: where they stand, their goodput and their reports.

    Args:
        folder: runs lie in it or at most `DEPTH` folders below it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watcher = RunsWatcher()
        self._lock = threading.Lock()
        self._scanned = 0.0
        self._runs: dict[str, Run] = {}
        self._glances: dict[str, tuple[float, RunSummary | DamagedRun]] = {}
        self._looks: dict[str, tuple[float, RunStatus | DamagedRun]] = {}
        self._goodput: dict[str, _CachedPage] = {}
        self._reports: dict[str, _CachedPage] = {}
        self._reporter = ReportWorker(_alone)
        self._reckoner = ReportWorker(_in_the_background)

    def close(self) -> None:
        """End the processes."""
        self._reporter.end()
        self._reckoner.end()

    def overview(self, page: int) -> tuple[str, list[str]] | None:
        """Return a page of the list of runs, counted from 1, and who stands in it; None where there is no such page.

        Raises RelayrunError or OSError where the folder cannot be read.
        """
        with self._lock:
            now = time.time()
            runs = self._scan(now)
            pages = max(1, -(-len(runs) // RUNS_PER_PAGE))
            if not 1 <= page <= pages:
                return None
            names = sorted(runs, key=lambda name: _changed(runs[name]), reverse=True)[
                (page - 1) * RUNS_PER_PAGE : page * RUNS_PER_PAGE
            ]
            found = self._fresh(self._glances, self._watcher.glance, names, now)
            goodput = {
                name: kept.now() if (kept := self._goodput.get(name)) is not None else "…"
                for name, entry in found.items()
                if _has_begun(entry)
            }
        rows = list(found.items())
        text = overview.overview_page(str(self._folder), rows, goodput, now=now, page=page, pages=pages, of=len(runs))
        return text, names

    def reckon(self, names: Sequence[str]) -> None:
        """Have the goodput of runs reckoned, as they stood in a list, where that was never done or is long ago."""
        with self._lock:
            for name in names:
                now, entry = self._glances[name]
                run, kept = self._runs.get(name), self._goodput.get(name)
                if run is None or not _has_begun(entry):
                    continue
                if kept is None or (kept.made.done() and not _is_valid(kept, entry, now, REPORT_SECONDS)):
                    made = self._reckoner.begin(_goodput_of, str(run.path))
                    before = "…" if kept is None else kept.now()
                    self._goodput[name] = _CachedPage(_cache_key(entry), now, made, before=before)

    def report(self, name: str) -> str | None:
        """Return the report of the run with this path below the folder; None where the list has no such run.

        Raises RelayrunError where it cannot be made.
        """
        with self._lock:
            now = time.time()
            run = self._scan(now).get(name)
            if run is None:
                return None
            entry = self._fresh(self._looks, self._watcher.look, [name], now)[name]
            kept = self._reports.get(name)
            if kept is None or not _is_valid(kept, entry, now, SUMMARY_SECONDS):
                living = not isinstance(entry, DamagedRun) and entry.state in ("running", "queued", "unknown")
                home = "../" * (name.count("/") + 1)
                refresh = REPORT_REFRESH_SECONDS if living else None
                kept = _CachedPage(
                    _cache_key(entry), now, self._reporter.begin(_report_of, str(run.path), home, refresh)
                )
                self._reports.pop(name, None)
                self._reports[name] = kept
                self._forget_old_reports()
        try:
            return kept.made.result(WORKER_SECONDS)
        except TimeoutError:
            if kept.made.done():
                raise
            raise RelayrunError(f"it is not made after {WORKER_SECONDS:.0f} s", hint="ask again later") from None

    def _forget_old_reports(self) -> None:
        """Keep the reports that were asked for last."""
        for name in list(self._reports)[:-20]:
            del self._reports[name]

    def _scan(self, now: float) -> dict[str, Run]:
        """The runs, by their paths below the folder."""
        if now - self._scanned > SUMMARY_SECONDS:
            found = find_runs_below(self._folder, depth=FOLDER_DEPTH)
            above = os.path.join(self._folder, "")
            own = self._folder.name  # of the folder where it is a run itself
            self._runs = {str(run.path).removeprefix(above) if run.path != self._folder else own: run for run in found}
            self._scanned = now
        return self._runs

    def _fresh(
        self, known: dict[str, tuple[float, S]], watch: Callable[..., Sequence[S]], names: Sequence[str], now: float
    ) -> dict[str, S]:
        """Where these runs stand; what is known since a moment ago is not looked at again."""
        old = [name for name in names if name not in known or now - known[name][0] > SUMMARY_SECONDS]
        paths = {str(self._runs[name].path): name for name in old}
        for entry in watch([self._runs[name] for name in old], now=now):
            known[paths[entry.path]] = now, entry
        return {name: known[name][1] for name in names}


def _has_begun(entry: RunSummary | DamagedRun) -> bool:
    return isinstance(entry, RunSummary) and entry.attempt is not None


def _changed(run: Run) -> float:
    """When something was last heard of a run, as far as the times of its files tell."""
    times = []
    for path in (run.metrics_view, run.attempts_view, run.plan, run.stop):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


def _is_valid(kept: _CachedPage, entry: RunSummary | DamagedRun, now: float, seconds: float) -> bool:
    """Whether nothing was seen since that could make another one of it, or it is not so old yet."""
    if kept.failed:  # what it met may have passed
        return now - kept.since < SUMMARY_SECONDS
    return kept.of == _cache_key(entry) or now - kept.since < seconds


def _cache_key(entry: RunSummary | DamagedRun) -> tuple[object, ...]:
    """What is another when a run's report is another, or its goodput, to which evaluations of their own add nothing."""
    if isinstance(entry, DamagedRun):
        return (entry.error,)
    evaluated = len(getattr(entry, "evaluations", ()))
    return entry.state, entry.stop, entry.attempt, entry.iteration, entry.updated, entry.durable_iteration, evaluated


def _alone() -> None:
    """Let the server alone hear Ctrl-C, which a terminal sends to all."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _in_the_background() -> None:
    _alone()
    os.nice(19)


def _goodput_of(path: str) -> str:
    """The goodput of a run in words; nothing where it is not known. Raises OSError, which may pass."""
    from relayrun.watch.goodput.account import account_for_run

    try:
        return f"{account_for_run(Run(Path(path))).goodput:.1%}"
    except (RelayrunError, ValueError, KeyError, TypeError):  # its report says why
        return ""


def _report_of(path: str, home: str, refresh: int | None) -> str:
    from relayrun.watch.report.document import report_page
    from relayrun.watch.report.report_data import read_report_data

    try:
        return report_page([read_report_data(Run(Path(path)))], now=time.time(), home=home, refresh=refresh)
    except RelayrunError as error:  # its other parts do not travel
        raise RelayrunError(str(error)) from None


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    server_version = "relayrun"
    sys_version = ""
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer with a page."""
        self._listed: list[str] = []
        with contextlib.suppress(ConnectionError, TimeoutError):  # who asked has gone
            self._answer(*self._page())
            self.wfile.flush()
        self.server.gallery.reckon(self._listed)

    do_HEAD = do_GET

    def _page(self) -> tuple[int, str]:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not HOST_HEADER.fullmatch(hosts[0]):
            return 403, overview.message_page("Refused", "Ask for it as 127.0.0.1 or localhost.")
        path, _, query = self.path.partition("?")
        key, slash, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(key.encode(), self.server.key.encode()):
            return 404, overview.message_page("Not here", "The address that was printed has a key in it.")
        try:
            page = None
            if slash and not rest:
                number = re.fullmatch(r"(?:page=([0-9]{1,6}))?", query)
                found = self.server.gallery.overview(int(number[1] or 1)) if number else None
                page, self._listed = found or (None, [])
            elif rest.startswith("run/"):
                page = self.server.gallery.report(unquote(rest.removeprefix("run/")))
            if page is not None:
                return 200, page
        except (RelayrunError, OSError) as error:
            return 500, overview.message_page("No page", str(error))
        except Exception as error:  # a defect with one run must not end the others' pages
            log.exception("a page could not be made")
            return 500, overview.message_page("No page", f"{type(error).__name__}: {error}")
        return 404, overview.message_page("Not here", "There is no such run in this folder.")

    def _answer(self, status: int, page: str) -> None:
        data = page.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in RESPONSE_HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        """Keep quiet: an address has the key in it."""


class _Server(ThreadingHTTPServer):
    """Answers on loopback alone."""

    daemon_threads = True

    def __init__(self, port: int, gallery: ReportGallery) -> None:
        self.gallery = gallery
        self.key = secrets.token_urlsafe(16)
        super().__init__((LOOPBACK, port), _Handler)


@contextlib.contextmanager
def serve_reports(folder: Path, *, port: int) -> Iterator[tuple[str, _Server]]:
    """Yield the address of a list of the runs in a folder, and its server, which has yet to be run.

    `port`: 0: any free one. Raises InputError where the folder cannot be read, or the port is taken.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", where=folder, hint="give the folder that your runs lie in")
    gallery = ReportGallery(folder)
    try:
        with _listen(port, gallery) as server:
            yield f"http://{LOOPBACK}:{server.server_address[1]}/{server.key}/", server
    finally:
        gallery.close()


def _listen(port: int, gallery: ReportGallery) -> _Server:
    try:
        return _Server(port, gallery)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"port {port} of {LOOPBACK} cannot be listened on: {getattr(error, 'strerror', None) or error}",
            hint="give another one with --port, or --port 0 for any free one",
        ) from None
