"""TransformerEngine's layers where it is installed on a GPU, local ones elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MISSING = "TransformerEngine is not installed where the ranks run, and "


def test_the_layers_follow_the_setting_the_installation_and_the_gpu() -> None:
    program = Path(__file__).with_name("layer_choice.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for gpu in (False, True):
        without = found[f"TE False, GPU {gpu}"]
        assert (without["auto"], without["auto, masked"], without["local"]) == ("local", "local", "local")
        assert without["transformer_engine"] == MISSING + "training.transformer_impl asks for it"
        assert without["context parallel"] == without["window"] == "local"
        installed = found[f"TE True, GPU {gpu}"]
        assert installed["auto"] == ("transformer_engine" if gpu else "local")
        assert installed["context parallel"] == installed["window"] == installed["auto"]
        assert installed["window, context parallel"] == without["window, context parallel"] == "local"
        assert (installed["auto, masked"], installed["local"]) == ("local", "local")
        assert installed["transformer_engine"] == "transformer_engine"
