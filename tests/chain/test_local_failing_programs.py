"""Failures of real programs through the real job script, as `relayrun why` explains them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.rundir.run import stop_reason
from relayrun.watch.why import explain
from tests.workspace import ends

from .conftest import MakeRun
from .failing_programs import PROGRAMS
from .test_local_errors import run_chain

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_cause_of_a_failing_program(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "run.sh").write_text(f"cd {folder}\nexport PATH={Path(sys.executable).parent}:$PATH\n{program.text}")
    words = ["bash", str(folder / "run.sh")]
    settings = {"total_steps": None, "trainer": "command", "ntasks_per_node": 1, "trainer_settings": {"run": words}}
    chain = ChainSection(auto_requeue=False, fallback_job=False, node_health="off", start_timeout=300)
    run, plan = make_run(chain=chain, **settings)
    run_chain(run, plan)
    assert ends(run)[0].cause in ("failed", "fatal")
    found = explain(run, 1)
    assert program.words in found.quote, (found, stop_reason(run))
    assert found.whose in (program.whose or ("unknown",)), found
    assert (found.certainty == "unknown") is not bool(program.whose), found
