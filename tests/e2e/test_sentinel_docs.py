"""Every command of docs/how-to/sentinel.md runs; the line of the crontab as cron starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun import places
from relayrun.errors import user_name
from relayrun.watch.status import cron_check_record
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.readme import ROOT

PAGE = (ROOT / "docs/how-to/sentinel.md").read_text(encoding="utf-8")
OF_CRON = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_page_is_short_and_every_block_has_a_test() -> None:
    assert len(PAGE.splitlines()) <= 150
    assert (len(blocks("crontab")), len(blocks("bash"))) == (1, 1)


@pytest.mark.slow
def test_the_crontab_and_the_commands(make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    run, _ = make_run(folder="my-project/logs/runs/my-project/my-run", auto_requeue=False)
    run.stop.write_text("stopped by ada\n")
    project = tmp_path / "my-project"
    (project / places.PROJECT_MARKER).touch()
    (project / ".venv").symlink_to(sys.prefix)
    runs = project / "logs/runs"
    (line,) = blocks("crontab")[0].splitlines()
    of_cron = ["/bin/sh", "-c", line.split(" ", 5)[5].replace("/home/ada", str(tmp_path))]
    environment = OF_CRON | {"HOME": str(tmp_path)}
    done = subprocess.run(of_cron, env=environment, capture_output=True, text=True, cwd="/", check=False, timeout=1000)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    first = cron_check_record.read_cron_check(runs, user_name(os.geteuid()))
    assert first is not None
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{OF_CRON['PATH']}"}
    by_hand = ["bash", "-euo", "pipefail", "-c", blocks("bash")[0]]
    done = subprocess.run(
        by_hand, env=environment, capture_output=True, text=True, cwd=project, check=False, timeout=1000
    )
    assert (done.returncode, done.stderr) == (0, "")
    second = cron_check_record.read_cron_check(runs, user_name(os.geteuid()))
    assert second is not None
    assert second.period == second.time - first.time
    (said,) = re.findall(r"^sentinel: looked .*$", done.stdout, re.M)
    assert f" s ago ({runs}, by {second.user} on {second.host})" in said
    assert re.sub(r"\d+ s", "40 s", said).startswith("sentinel: looked 40 s ago (")
