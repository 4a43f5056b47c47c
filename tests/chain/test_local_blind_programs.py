"""Thirty programs that really fail, by an author who had seen no table and no test, through the real job script.

`blind_programs.txt` has, before each, the owners that an operator would accept and words of the line that he would
quote. At first sight 17 were right, 11 unknown, 2 wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.watch.why import explain
from tests.watch.test_blind_failures import Case, judge, read_cases
from tests.workspace import ends

from .conftest import MakeRun
from .test_local_errors import run_chain

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAMS = read_cases("../chain/blind_programs.txt")
UNKNOWN = ("03-rank-leaves-early", "27-group-refused")
"""What nothing in a log tells for sure: a rank that said goodbye in words of its own, a server that is not there."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case[0])
def test_the_first_cause_of_a_program_that_really_fails(make_run: MakeRun, tmp_path: Path, case: Case) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.sh").write_text(case[3])
    start = f"cd {folder}; export PATH={Path(sys.executable).parent}:$PATH; exec bash train.sh"
    settings = {"total_steps": None, "trainer": "command", "ntasks_per_node": 1}
    chain = ChainSection(auto_requeue=False, fallback_job=False, node_health="off", start_timeout=300)
    run, plan = make_run(chain=chain, trainer_settings={"run": ["bash", "-c", start]}, **settings)
    run_chain(run, plan)
    assert ends(run)[0].cause in ("failed", "fatal")
    found = explain(run, 1)
    expected = "unknown" if case[0] in UNKNOWN else "right"
    assert judge(case, found) == expected, (found.whose, found.certainty, found.quote)
