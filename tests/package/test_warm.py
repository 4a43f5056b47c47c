"""A program that starts without imports (tests/warm) is the program that would have started with them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.waiting import read_line, wait_for
from tests.warm.server import IMPORTED

pytestmark = pytest.mark.slow

PROBE = ["-m", "tests.warm.probe"]
ENVIRONMENT = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "RANK": "0", "ODD": "it's\nüñ=", "PYTHONPATH": ""}


def limit() -> None:
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 31))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def start(python: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, *PROBE, *words],
        cwd=warm.ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


@pytest.mark.long
def test_it_has_what_it_would_have_had() -> None:
    said = []
    for python in (sys.executable, warm.python()):
        out, errors = start(python, "say", "a b", "").communicate("input\n", timeout=300)
        assert out, errors
        said.append(json.loads(out))
    assert said[0] == said[1]
    assert said[0]["argv"][1:] == ["say", "a b", ""]


def test_what_takes_long_to_import_is_there_at_once() -> None:
    out, errors = start(warm.python(), "imported").communicate("", timeout=300)
    assert out, errors
    assert json.loads(out) == list(IMPORTED)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("exit", "0"), 0),
        (("exit", "7"), 7),
        (("die", str(int(signal.SIGKILL))), -signal.SIGKILL),
        (("die", str(int(signal.SIGTERM))), -signal.SIGTERM),
        (("raise",), 1),
    ],
)
def test_it_ends_as_it_would_have(words: tuple[str, ...], code: int) -> None:
    process = start(warm.python(), *words)
    _, errors = process.communicate("", timeout=300)
    assert process.returncode == code
    assert ("ValueError: as it was told" in errors) == (words == ("raise",))


def state(pid: int) -> str:
    """R, S, T, ...; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_signals_reach_it_and_neither_outlives_the_other() -> None:
    def waiting() -> tuple[subprocess.Popen[str], int]:
        process = start(warm.python(), "wait")
        return process, int(read_line(process))

    process, pid = waiting()
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state(pid) == "T")
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: state(pid) != "T")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=300)
    assert process.returncode == 12

    process, pid = waiting()
    process.kill()
    wait_for(lambda: state(pid) == "")
    process.communicate(timeout=300)

    process, pid = waiting()
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL


def test_the_program_of_another_checkout_is_started_for_real(tmp_path: Path) -> None:
    package = tmp_path / "relayrun" / "train"
    package.mkdir(parents=True)
    (tmp_path / "relayrun/__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nprint('torch' in sys.modules, __file__)\n")
    for folder, environment in ((tmp_path, {}), (warm.ROOT / "tests", {"PYTHONPATH": str(tmp_path)})):
        done = subprocess.run(
            [warm.python(), "-m", "relayrun.train"],
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        assert done.stdout == f"False {package / '__main__.py'}\n"
