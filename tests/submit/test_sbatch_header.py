"""Options of sbatch in a script of somebody else, as sbatch itself reads them."""

from __future__ import annotations

import pytest

from relayrun.submit.sbatch_header import sbatch_options


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--tasks-per-node 4", ("ntasks-per-node", "4")),
        ("--ntasks-per-n=4", ("ntasks-per-node", "4")),
        ("--part debug", ("partition", "debug")),
        ("--gpus=8", ("gpus", "8")),  # an option, and the beginning of others
        ("--mem=0", ("mem", "0")),
        ("--environment=ngc", ("environment", "ngc")),  # a plugin's
        ("-N 2-2", ("nodes", "2")),
    ],
)
def test_an_option_has_one_name(line: str, option: tuple[str, str]) -> None:
    ((name, (value, _)),) = sbatch_options(f"#!/bin/bash\n#SBATCH {line}\n").items()
    assert (name, value) == option
