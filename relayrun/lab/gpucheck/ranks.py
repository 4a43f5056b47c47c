"""How a program of the check is started on the ranks of this machine: as a training run's ranks are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from relayrun import places
from relayrun.files import read_json
from relayrun.lab.gpucheck.logs import log_error, log_tail
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures


def rank_command(setup: CheckSetup, program: str, *arguments: str, container: Sequence[str] = ()) -> list[str]:
    """Return what one rank executes; in front of it stands what starts one for every rank.

    `container`: the command of a container that the rank has to enter; inside the check's job it is in there already.
    """
    prefix = setup.cluster.get("command_prefix", [])
    return [
        "bash",
        str(places.shared_file("launchers/lib/rank.sh")),
        *container,
        *prefix,
        setup.python,
        "-m",
        program,
        *arguments,
    ]


def run_program(setup: CheckSetup, program: str, *, ranks: int = 1, **arguments: object) -> Any:
    """Run a module of `programs` and return what it wrote to its `--output`. Raises CheckFailed with what it found."""
    short = program.rpartition(".")[2]
    setup.parts.mkdir(parents=True, exist_ok=True)
    output, log, given = (setup.parts / f"program-{short}.{end}" for end in ("json", "log", "setup.json"))
    output.unlink(missing_ok=True)
    setup.write(given)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
    starter = [sys.executable, "-m", "relayrun.control.scheduler.tasks", f"--ntasks={ranks}", "--"]
    command = [*starter, *rank_command(setup, program, f"--setup={given}", f"--output={output}", *options)]
    with log.open("wb") as file:
        code = subprocess.run(
            command,
            cwd=places.CODE_ROOT,
            env=setup.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        ).returncode
    found = read_json(output) if output.exists() else {}
    if code or not output.exists():
        print(log_tail(log), flush=True)
        raise CheckFailed(f"the program {short} failed: {log_error(log, code)}", found=found)
    return found


def run_and_record_program(setup: CheckSetup, figures: PartFigures, program: str, **arguments: Any) -> dict[str, Any]:
    """Run a module of `programs`, put what it wrote on record, and return it; also what one that failed had written.

    Raises CheckFailed.
    """
    found: dict[str, Any] = {}
    try:
        found = run_program(setup, program, **arguments)
    except CheckFailed as error:
        found = error.found or {}
        raise
    finally:
        for name, value in found.items():
            figures.add(name, value)
    return found
