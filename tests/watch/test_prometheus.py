"""`relayrun metrics`: the text by prometheus-client's own parser, the file, the server, and the dashboard's queries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import relayrun.watch
from relayrun.cli import main
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import user_name
from tests.history import make_history, queue_is_run
from tests.owners import give_away
from tests.plans import plan_with
from tests.waiting import wait_for

parser = pytest.importorskip("prometheus_client.parser")
DASHBOARD = Path(__file__).resolve().parents[2] / "docs/how-to/grafana-dashboard.json"
PROMETHEUS = os.environ.get("PROMETHEUS") or shutil.which("prometheus")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = make_history(tmp_path / "runs/history/one", lines=300, attempts=3)
    plan_with(Plan.load(made), max_node_hours=100.0).write(made.plan)
    now = time.time()
    for number in (1, 2, 3):
        attempt, start = made.attempt(number), now - 3600 * (4 - number)
        begin, end = attempt.started_record(), attempt.read_end()
        replace(begin, start_time=start, job_start_time=start, job_submit_time=start - 60).write(attempt.begin)
        assert end is not None
        replace(end, end_time=start + 3000).write(attempt.end)
    with queue_is_run(made):
        yield made


def samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_text_has_each_figure_once_and_at_most_60_series_a_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", str(run.path)]) == 0
    found = samples(capsys.readouterr().out)
    for name in ("iteration", "durable_iteration"):
        assert [each.value for each in found[f"relayrun_{name}"]] == [300]
    assert (found["relayrun_mfu_ratio"][0].value, found["relayrun_tokens_per_second"][0].value) == (0.41, 412345.6789)
    owner = user_name(run.path.stat().st_uid)
    assert found["relayrun_run_state"][0].labels == {"run": "tests/history", "user": owner, "state": "running"}
    assert found["relayrun_budget_node_seconds"][0].value == 360000
    assert found["relayrun_budget_used_node_seconds"][0].value == 9000
    assert sum(each.value for each in found["relayrun_node_seconds"]) == 9000
    assert found["relayrun_remaining_seconds"][0].value == 9000 * 2700 / 300
    series = [each for several in found.values() for each in several]
    assert len(series) <= 60
    assert not any({"rank", "node", "instance"} & each.labels.keys() for each in series)
    main(["metrics", str(run.path.parents[1])])
    assert samples(capsys.readouterr().out).keys() == found.keys()


def test_a_damaged_run_and_a_run_that_waits_do_not_hide_the_others(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run(run.path.with_name("other"))
    other.path.mkdir()
    other.plan.write_text("{")
    assert main(["metrics", str(run.path.parent)]) == 0
    states = samples(capsys.readouterr().out)["relayrun_run_state"]
    assert {each.labels["run"]: each.labels["state"] for each in states} == {
        "tests/history": "running",
        str(other.path): "damaged",
    }


def test_runs_of_two_users_with_one_name_are_told_apart(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Run(run.path.with_name("theirs"))
    shutil.copytree(run.path, other.path)
    give_away(monkeypatch, other.path)
    assert main(["metrics", str(run.path), str(other.path)]) == 0
    series = [each for several in samples(capsys.readouterr().out).values() for each in several]
    labels = [(each.name, *sorted(each.labels.items())) for each in series]
    assert len(set(labels)) == len(labels)
    assert len({each.labels["user"] for each in series}) == 2


def test_a_file_is_replaced_at_once_and_readable_by_the_collector(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "relayrun.prom"
    target.write_text("before")
    assert main(["metrics", str(run.path), "--output", str(target)]) == 0
    assert samples(target.read_text())["relayrun_iteration"][0].value == 300
    assert target.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["relayrun.prom"]


def test_without_the_library_the_error_names_the_extra(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "relayrun.watch.prometheus", raising=False)
    monkeypatch.delattr(relayrun.watch, "prometheus", raising=False)
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("site-packages")])
    assert main(["metrics", str(run.path)]) == 1
    assert "pip install 'relayrun[metrics]'" in capsys.readouterr().err


def test_every_query_of_the_dashboard_names_metrics_that_there_are(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["metrics", str(run.path)])
    known = set(samples(capsys.readouterr().out))
    asked = {name for expression in expressions() for name in re.findall(r"relayrun_\w+", expression)}
    assert asked
    assert asked <= known
    assert known - asked == set()


@contextmanager
def served(run: Run, key: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "relayrun", "metrics", str(run.path), "--serve", "0", "--key-file", str(key)]
    command = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "-", *command]  # as on most machines
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def answer(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
        return str(reply.read().decode())


@pytest.mark.slow
def test_the_server_answers_on_loopback_to_those_who_know_the_key(run: Run, tmp_path: Path) -> None:
    key = tmp_path / "key"
    with served(run, key) as url:
        assert url.startswith("http://127.0.0.1:")
        assert key.stat().st_mode & 0o777 == 0o600
        found = samples(answer(url, Authorization=f"Bearer {key.read_text()}"))
        assert found["relayrun_iteration"][0].value == 300
        for headers in ({}, {"Authorization": "Bearer x"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                answer(url, **headers)
    key.chmod(0o644)
    assert main(["metrics", "--serve", "0", "--key-file", str(key)]) == 1


FLOOD = """
import resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
for number in range(2000):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30))
    held[-1].sendall(b"GET / HTTP/1.1\\r\\n" if number % 2 else b"")
print("held", flush=True)
while True:
    time.sleep(0.5)
    for each in held[1::2]:
        try:
            each.sendall(b"X-a: b\\r\\n")
        except OSError:
            pass
"""


@pytest.mark.slow
def test_connections_that_ask_nothing_leave_room_for_the_owner(run: Run, tmp_path: Path) -> None:
    """Another user opens 2,000, of which half send a header now and then, and never the last."""
    key = tmp_path / "key"
    with served(run, key) as url:
        port = urllib.parse.urlsplit(url).port
        with subprocess.Popen([sys.executable, "-c", FLOOD, str(port)], stdout=subprocess.PIPE, text=True) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == "held\n"
                for _ in range(3):
                    assert "relayrun_iteration" in answer(url, Authorization=f"Bearer {key.read_text()}")
            finally:
                flood.kill()


@pytest.mark.long
@pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus: PATH, or its program in PROMETHEUS")
def test_a_real_prometheus_answers_every_query_of_the_dashboard(run: Run, tmp_path: Path) -> None:
    key, config = tmp_path / "key", tmp_path / "prometheus.yml"
    with served(run, key) as url:
        target = urllib.parse.urlsplit(url).netloc
        job = {"job_name": "relayrun", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
        job["authorization"] = {"credentials_file": str(key)}  # type: ignore[assignment]
        config.write_text(json.dumps({"scrape_configs": [job]}))
        place = "127.0.0.1:19790"
        options = [
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address={place}",
        ]
        with subprocess.Popen([str(PROMETHEUS), *options], stderr=subprocess.DEVNULL) as server:
            try:

                def rows(expression: str) -> list[Any]:
                    query = urllib.parse.urlencode({"query": expression.replace("$run", ".*")})
                    try:
                        return list(json.loads(answer(f"http://{place}/api/v1/query?{query}"))["data"]["result"])
                    except urllib.error.URLError:
                        return []

                wait_for(lambda: bool(rows("relayrun_iteration")))
                empty = [expression for expression in expressions() if not rows(expression)]
                assert empty == []
            finally:
                server.terminate()


def test_of_an_old_attempt_no_file_is_opened_in_vain(tmp_path: Path) -> None:
    """Its cost with a million attempts is the files that it opens: begin, end, and metrics that are not there."""
    program = (
        "import sys; from pathlib import Path; from relayrun.watch.goodput.account import account_for_run\n"
        "from relayrun.watch.goodput.facts import read_run_facts; from relayrun.control.rundir.run import Run\n"
        "run, opened = Run(Path(sys.argv[1])), []\n"
        "sys.addaudithook(lambda event, details: event == 'open' and opened.append(str(details[0])))\n"
        "account_for_run(run, facts=read_run_facts(run, now=1e9, ask=False))\n"
        "print(sum(path.startswith(sys.argv[1]) for path in opened))"
    )
    counts = []
    for attempts in (10, 30):
        made = make_history(tmp_path / str(attempts), lines=300, attempts=attempts)
        for number in made.attempt_numbers()[:-5]:
            for path in made.attempt(number).path.iterdir():
                if path.name not in ("begin.json", "end.json"):
                    path.unlink()
        command = [sys.executable, "-c", program, str(made.path)]
        counts.append(int(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout))
    assert counts[1] - counts[0] <= 3 * 20, counts
