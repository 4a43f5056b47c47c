"""Metrics of runs for Prometheus, from their records: nothing runs in a job for it.

Units and names follow Prometheus' conventions: seconds, ratios, times instead of ages. A run has at most 60 series, and
no label per rank or node.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir.merged_metrics import newest_valid_lines
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError, user_name
from relayrun.files import raise_open_file_limit
from relayrun.watch.goodput.account import read_attempt_sums
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, PARTS
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary, damaged_records_as_error

Value = float | int | None
Samples = Iterator[tuple[str, Mapping[str, str], Value]]
"""Name of a metric, its labels beside `run` and `user`, and a value; None leaves the sample out."""

METRICS = {
    "run_state": "1 for the present state of the chain",
    "iteration": "Newest iteration",
    "end_iteration": "Iteration at which the run ends",
    "loss": "Loss of the newest step in nats per token",
    "tokens_per_second": "Tokens per second of the newest step, over all ranks",
    "mfu_ratio": "Model FLOP utilisation of the newest step",
    "last_step_timestamp_seconds": "End of the newest step, in seconds since 1970",
    "durable_iteration": "Iteration of the newest whole checkpoint",
    "durable_timestamp_seconds": "Time of the newest whole checkpoint, in seconds since 1970",
    "remaining_seconds": "Seconds of running jobs until the end of the run, at the pace of the last attempts",
    "remaining_node_seconds": "Node seconds until the end of the run, at the pace of the last attempts",
    "node_seconds": "Node time of all jobs by its use; lost steps move from step to redone",
    "goodput_ratio": "Share of the node time in steps that count",
    "effective_training_time_ratio": "Share of the time since the first submit in steps that count",
    "wait_seconds": "Seconds without nodes: queued, in back-off after a failure, stopped without a submitted job",
    "budget_node_seconds": "chain.max_node_hours, in node seconds",
    "budget_used_node_seconds": "Node seconds that count against the budget",
    "attempts_total": "Attempts that have begun",
    "attempt_ends_total": "Ended attempts by cause",
    "rank_restarts_total": "Failures of ranks inside a job by cause, after which ranks are restarted",
    "node_failures_total": "Failures that were attributed to a node",
}
"""Help of each metric `relayrun_NAME`; names of counters end with `_total`."""


class _Listed(Run):
    """A run for one look, which lists its attempts once."""

    def attempt_numbers(self) -> list[int]:
        return self._numbers

    @cached_property
    def _numbers(self) -> list[int]:
        return super().attempt_numbers()


class RunsCollector:
    """A collector of prometheus-client: each scrape reads the records of the runs anew."""

    def __init__(self, runs: Callable[[], Sequence[Run]]) -> None:
        self._runs, self._watcher = runs, RunsWatcher()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. A damaged run has its state alone."""
        now, families = time.time(), dict[str, GaugeMetricFamily | CounterMetricFamily]()
        runs = {str(run.path): _Listed(run.path) for run in self._runs()}
        for found in self._watcher.summaries([*runs.values()], now=now):
            run = runs[found.path]
            name = found.path if isinstance(found, DamagedRun) else found.run
            with contextlib.suppress(OSError):  # the run was removed meanwhile
                own = {"run": name, "user": user_name(Path(found.path).stat().st_uid)}
                for metric, further, value in run_samples(found, run, self._watcher.plans.get(run.path), now=now):
                    if value is not None:
                        kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
                        if metric not in families:
                            families[metric] = kind(f"relayrun_{metric}", METRICS[metric], labels=[*own, *further])
                        families[metric].add_metric([*own.values(), *further.values()], float(value))
        yield from families.values()


def metrics_text(runs: Sequence[Run]) -> bytes:
    """Return the metrics of these runs in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(RunsCollector(lambda: runs))
    return generate_latest(registry)


class _QuietHandler(WSGIRequestHandler):
    def handle(self) -> None:
        """Answer a request whose head is there within two seconds; other connections would keep threads and files."""
        until = time.monotonic() + 2
        self.connection.settimeout(2)
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in (head := self.connection.recv(65536, socket.MSG_PEEK)):
                if not head or time.monotonic() > until:
                    return
                time.sleep(0.05)
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def serve(port: int, key: str, runs: Callable[[], Sequence[Run]]) -> None:
    """Answer requests with this key on the loopback interface, until Ctrl-C. Other users may open connections to it."""
    raise_open_file_limit()
    registry = CollectorRegistry()
    registry.register(RunsCollector(runs))
    answer: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
    expected = f"Bearer {key}".encode()

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), expected):
            return answer(environ, start)
        start("401 Unauthorized", [])
        return []

    ThreadingWSGIServer.request_queue_size = 1024
    with make_server("127.0.0.1", port, guarded, ThreadingWSGIServer, _QuietHandler) as server:
        print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
        server.serve_forever()


def run_samples(found: RunSummary | DamagedRun, run: Run, plan: Plan | None, *, now: float) -> Samples:
    """Yield the samples of one run. `plan`: None if it is damaged. `now`: seconds since 1970."""
    if isinstance(found, DamagedRun) or plan is None:
        yield "run_state", {"state": "damaged"}, 1
        return
    yield "run_state", {"state": found.state}, 1
    yield "end_iteration", {}, found.total_steps
    yield "last_step_timestamp_seconds", {}, found.step_time
    for name in ("iteration", "loss", "tokens_per_second", "durable_iteration"):
        yield name, {}, getattr(found, name)
    yield "durable_timestamp_seconds", {}, None if found.durable_age is None else now - found.durable_age
    if (left := found.remaining) is not None:
        yield "remaining_seconds", {}, left.seconds
        yield "remaining_node_seconds", {}, left.node_hours * 3600
    with contextlib.suppress(RelayrunError, OSError), damaged_records_as_error(run):  # also: no attempt has begun
        lines = islice(newest_valid_lines(run), 20)
        yield "mfu_ratio", {}, next((line["mfu"] for line in lines if line.get("mfu") is not None), None)
        yield "node_failures_total", {}, len(read_node_failures(run))
        sums = read_attempt_sums(run, plan, now=now)
        if plan.chain.max_node_hours is not None:
            yield "budget_node_seconds", {}, plan.chain.max_node_hours * 3600
            yield "budget_used_node_seconds", {}, sums["used"] / MICROSECONDS_PER_SECOND
        yield from _sums_samples(sums)


def _sums_samples(sums: Mapping[str, int]) -> Samples:
    ends, parts, waits = (
        {name.removeprefix(kind): amount for name, amount in sums.items() if name.startswith(kind)}
        for kind in ("end ", "part ", "wait ")
    )
    yield "attempts_total", {}, sum(ends.values())
    for cause, count in ends.items():
        yield "attempt_ends_total", {"cause": cause}, None if cause == "running" else count
    for cause in ("node", "rank", "other"):
        yield "rank_restarts_total", {"cause": cause}, sums.get(f"restart {cause}", 0)
    for part in PARTS:
        seconds = parts.get(part.name, 0) / MICROSECONDS_PER_SECOND
        yield "node_seconds", {"part": part.name, "group": part.group}, seconds
    allocated, elapsed = sum(parts.values()), sums["end"] - sums["begin"]
    yield "goodput_ratio", {}, parts.get("step", 0) / allocated if allocated else 0.0
    yield "effective_training_time_ratio", {}, sums["stepped"] / elapsed if elapsed else 0.0
    for kind, amount in waits.items():
        yield "wait_seconds", {"kind": kind}, amount / MICROSECONDS_PER_SECOND
