"""A run that starts from a Hugging Face model begins where that model stands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from relayrun.config.compose import yaml_file
from relayrun.files import read_json, read_json_lines
from relayrun.tokens.mixture import audit
from tests.export.models import make_hf
from tests.workspace import VOCABULARY, Workspace

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_loss_of_an_imported_model_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    Workspace.make(tmp_path)
    ends = {"eos_token_id": [0, 5], "pad_token_id": 2}
    hf = make_hf(tmp_path / "hf", vocabulary=VOCABULARY, tie_word_embeddings=True, **ends)
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    (hf / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    start = tmp_path / "it's a start"
    run_python("-m", "relayrun.cli", "import", "hf", hf, "--output", start, "--make-vocab-size-divisible-by", "100")
    config = Workspace(tmp_path).config(
        "run",
        model=yaml_file.read_yaml(start / "model.yaml").values["model"]
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        training={"steps": 4},
        checkpoint={"interval": 4},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
    )
    run_python("launchers/submit.py", config, "--load", start, "--set", "checkpoint.finetune=true")
    run = Workspace(tmp_path).run("run")
    first = next(line for line in read_json_lines(run.metrics_view) if "loss" in line)
    samples = audit.audited_samples(audit.audit_run(run), range(8))
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(hf)(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert first["iteration"] == 1
    assert abs(first["loss"] - expected) < 1e-5
    shutil.rmtree(start)
    said = run_python("-m", "relayrun.cli", "export", "hf", run.path, "--output", tmp_path / "out")
    assert said.startswith("iteration 4: ")
    config_json = read_json(tmp_path / "out/config.json")
    assert config_json["num_hidden_layers"] == 3
    assert {name: config_json[name] for name in ends} == ends
    assert read_json(tmp_path / "out/generation_config.json")["temperature"] == 0.5
    assert (run.path / "original" / "chat_template.jinja").is_file()
