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
import multiprocessing
import os
import queue
import re
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

from relayrun.control.rundir.find_runs import find_runs_below
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RelayrunError
from relayrun.watch.report.html import CONTENT_POLICY, Markup, format_time, html_page, html_table, join_markup, tag
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary
from relayrun.watch.status.tables import cron_check_lines, format_remaining, format_seconds

if TYPE_CHECKING:
    from relayrun.watch.status.run_status import RunStatus

# The page that lists the runs of a folder, each with a link to its report.

STATE_CLASSES = {
    "running": "good",
    "queued": "good",
    "broken": "bad",
    "damaged": "bad",
    "unknown": "soft",
    "stopped": "soft",
}
"""Classes of the style sheet, by the state of a chain."""
NO_RUNS = "There is no run here yet."
REFRESH_SECONDS = 30
"""After so long a browser asks for the page again."""
OVERVIEW_COLUMNS = (
    "run",
    "state",
    "iteration|n",
    "left|n",
    "loss|n",
    "goodput|n",
    "durable|n",
    "last sign of life|n",
    "the last end",
)


def overview_page(
    folder: str,
    found: Sequence[tuple[str, RunSummary | DamagedRun]],
    goodput: Mapping[str, str],
    *,
    now: float,
    page: int = 1,
    pages: int = 1,
    of: int,
) -> str:
    """Return the HTML of a page of a list of runs.

    Args:
        folder: what they lie in or below.
        found: each run's path below the folder, and where it stands; in the order of the page.
        goodput: by path, as far as it is reckoned.
        now: seconds since 1970.
        page: number of this page of the list, from 1.
        pages: how many there are.
        of: how many runs there are on all pages.
    """
    states = [entry.state if isinstance(entry, RunSummary) else "damaged" for _, entry in found]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    newer = tag("a", "newer", href=f"?page={page - 1}") if page > 1 else None
    older = tag("a", "older", href=f"?page={page + 1}") if page < pages else None
    more = tag("nav", f"Page {page} of {pages}. ", newer, " ", older) if pages > 1 else None
    rows = [_run_row(name, entry, goodput.get(name), now) for name, entry in found]
    body = tag(
        "main",
        tag("h1", "Runs"),
        tag("p", folder, class_="soft"),
        tag("p", f"{of:,} runs{f'; the {len(found)} here' if pages > 1 else ''}: {counts}." if found else NO_RUNS),
        *(tag("p", line, class_="soft") for line in cron_check_lines([entry for _, entry in found], now=now)),
        tag("p", f"As it was at {format_time(now)}; looked at again every {REFRESH_SECONDS} s.", class_="soft"),
        more,
        html_table(OVERVIEW_COLUMNS, rows) if rows else None,
        more,
    )
    return html_page("Runs", body, refresh=REFRESH_SECONDS)


def report_path(name: str) -> str:
    """Return where the report of a run stands, relative to the list."""
    return f"run/{quote(name, safe='/')}"


def _run_row(name: str, entry: RunSummary | DamagedRun, goodput: str | None, now: float) -> tuple[str, ...]:
    link = tag("a", name, href=report_path(name), class_="run")
    if isinstance(entry, DamagedRun):
        return (link, _state_cell("damaged"), "", "", "", "", "", "", entry.error)
    why = (entry.stop or entry.broken or entry.last_end or "").partition("\n")[0]
    sign = f"{format_seconds(now - entry.updated)} ago" if entry.updated else ""
    total = f" of {entry.total_steps:,}" if entry.total_steps else ""
    return (
        link,
        _state_cell(entry.state),
        f"{entry.iteration:,}{total}" if entry.attempt is not None else "",
        format_remaining(entry),
        f"{entry.loss:.4f}" if entry.loss is not None else "",
        goodput or "",
        "none whole" if entry.durable_iteration is None else f"{entry.durable_iteration:,}",
        sign,
        why,
    )


def _state_cell(state: str) -> Markup:
    return tag("span", state, class_=f"state {STATE_CLASSES.get(state, 'soft')}")


def message_page(title: str, words: str) -> str:
    """Return the HTML of a page that says why there is no other one."""
    lines = join_markup(tag("p", line) for line in words.splitlines())
    return html_page(title, tag("main", tag("h1", title), lines))


# A process that makes one text after the other for a server, and is begun anew where it was killed.

WorkItem = tuple["Future[str]", Callable[..., str], tuple[object, ...]]


class ReportWorker:
    """Makes one thing after the other in a process of its own, which begins with the first.

    Args:
        prepare: is called in the process first.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._lock = threading.RLock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._link: Connection | None = None
        self._waiting: queue.SimpleQueue[WorkItem | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def begin(self, make: Callable[..., str], *values: object) -> Future[str]:
        """Have the process call `make` with these values, once it is done with what it was given before.

        The future raises what `make` raises, and RelayrunError where the process has ended over it, or after `end`.
        """
        made: Future[str] = Future()
        with self._lock:  # or `end` would come between
            if self._ended:
                made.set_exception(RelayrunError("the server has ended"))
                return made
            if self._thread is None:
                self._running()
                thread = threading.Thread(target=self._serve, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.put((made, make, values))
        return made

    def end(self) -> None:
        """End the process, whatever it does; what was to be made raises RelayrunError."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        if self._process is not None:
            self._process.join()

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            made, make, values = work
            try:
                made.set_result(self._made(make, values))
            except Exception as error:
                made.set_exception(error)

    def _made(self, make: Callable[..., str], values: tuple[object, ...]) -> str:
        link = self._running()
        try:
            link.send((make, values))
            done, found = link.recv()
        except (EOFError, OSError):
            raise RelayrunError(
                f"the process that made it has ended ({self._how()})",
                hint="ask again; where that is killed too, memory may be short",
            ) from None
        if not done:
            raise found
        return str(found)

    def _running(self) -> Connection:
        """Return the way to the process; it is begun where there is none."""
        with self._lock:
            if self._ended:
                raise RelayrunError("the server has ended")
            if self._link is None or self._process is None or not self._process.is_alive():
                context = multiprocessing.get_context("spawn")
                self._link, other = context.Pipe()
                self._process = context.Process(target=_run_worker, args=(other, self._prepare), daemon=True)
                self._process.start()
                other.close()
            return self._link

    def _how(self) -> str:
        """How the process has ended, in words."""
        if self._process is None:
            return "it is not known how"
        self._process.join()
        code = self._process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _run_worker(link: Connection, prepare: Callable[[], None]) -> None:
    prepare()
    while True:
        try:
            make, values = link.recv()
        except EOFError:  # the server has gone
            return
        try:
            answer: tuple[bool, object] = True, make(*values)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = False, error
        try:
            link.send(answer)
        except (AttributeError, TypeError, ValueError) as error:  # it does not travel
            link.send((False, RuntimeError(f"{answer[1]!r}: {error}")))


S = TypeVar("S", bound="RunSummary | DamagedRun")

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
        folder: runs lie in it or at most `FOLDER_DEPTH` folders below it.
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
        text = overview_page(str(self._folder), rows, goodput, now=now, page=page, pages=pages, of=len(runs))
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
    from relayrun.watch.report.page import report_page
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
            return 403, message_page("Refused", "Ask for it as 127.0.0.1 or localhost.")
        path, _, query = self.path.partition("?")
        key, slash, rest = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(key.encode(), self.server.key.encode()):
            return 404, message_page("Not here", "The address that was printed has a key in it.")
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
            return 500, message_page("No page", str(error))
        except Exception as error:  # a defect with one run must not end the others' pages
            log.exception("a page could not be made")
            return 500, message_page("No page", f"{type(error).__name__}: {error}")
        return 404, message_page("Not here", "There is no such run in this folder.")

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
