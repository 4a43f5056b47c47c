"""A checkpoint of local layers, or an imported one, loads where the modules have TransformerEngine's extra state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.train.export import huggingface
from tests.export.models import make_hf

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_extra_state_that_a_checkpoint_lacks_is_none(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    huggingface.import_huggingface(make_hf(tmp_path / "hf"), imported)
    program = Path(__file__).with_name("extra_state.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path, imported], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "earlier, as before": "CheckpointException",  # what this is the cure of
        "earlier": "same",
        "earlier, local": "same",
        "now": "same",
        "now, by another program": "same",
        "now, more state": "same",
        "imported": "same",
        "imported, by another program": "same",
        "engine's, local": "same",
        "given": [None],
    }
