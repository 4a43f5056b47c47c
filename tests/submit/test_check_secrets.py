"""Settings that look like secrets are refused and not shown; what is none is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.masking import describe_secret
from relayrun.places import CODE_ROOT as ROOT
from relayrun.submit import submission
from tests.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Jobs log below `root` here."""
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs/slurm/training")
    return Workspace.make(tmp_path)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"cluster": {"environment": {"WANDB_API_KEY": "0123456789" * 4}}}, "cluster.environment.WANDB_API_KEY"),
        ({"cluster": {"environment": {"HF_TOKEN": "0123456789"}}}, "cluster.environment.HF_TOKEN"),
        ({"cluster": {"environment": {"AWS_SECRET_ACCESS_KEY": "x0123456789"}}}, "cluster.environment"),
        ({"cluster": {"environment": {"SOMETHING": "hf_" + "0123456789" * 4}}}, "cluster.environment.SOMETHING"),
        ({"job": {"setup": ["export PASSWORD=x0123456789"]}}, "job.setup"),
        ({"job": {"setup": ["ulimit -n 4096", "login --api-key x0123456789"]}}, "job.setup"),
        ({"job": {"setup": ["curl https://ann:x0123456789@host/file"]}}, "job.setup"),
        (
            {"cluster": {"environment": {"AWS_SECRET_ACCESS_KEY": "/Ja0123456789rXUtnFEMI7K9bPx/RfiCYEX0"}}},
            "cluster.environment",
        ),
        ({"cluster": {"environment": {"PGPASSWORD": "x0123456789"}}}, "cluster.environment.PGPASSWORD"),
        ({"cluster": {"environment": {"DB_PASS": "x0123456789"}}}, "cluster.environment.DB_PASS"),
        ({"cluster": {"environment": {"AUTHORIZATION": "Bearer x0123456789"}}}, "cluster.environment.AUTHORIZATION"),
        ({"cluster": {"environment": {"SLACK_WEBHOOK_URL": "https://host/services/T01/B0123456789ab2c/x"}}}, "SLACK"),
        ({"cluster": {"environment": {"AZURE_STORAGE_CONNECTION_STRING": "AccountKey=0123456789"}}}, "AZURE"),
        ({"job": {"setup": ['export WANDB_API_KEY="${WANDB_API_KEY:-%s}"' % ("0123456789" * 4)]}}, "job.setup"),
        ({"job": {"setup": [f"wandb login --relogin {'0123456789' * 4}"]}}, "job.setup"),
        ({"job": {"setup": [f"aws configure set aws_secret_access_key {'0123456789' * 4}"]}}, "job.setup"),
        ({"job": {"setup": ["export PASSWORD=$'x0123456789'"]}}, "job.setup"),
        ({"job": {"setup": ["export PASSWORD=${PASSWORD:-x0123456789}"]}}, "job.setup"),
    ],
)
def test_a_secret_in_the_config_is_refused_and_not_shown(
    settings: dict[str, Any], where: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.config("run", **settings)
    assert main(["submit", str(path)]) == 1
    assert main(["check", str(path)]) == 1
    shown = capsys.readouterr()
    assert "looks like a secret, and the config is copied into the run directory" in shown.out
    assert where in shown.out
    assert 'of mode 0600 in job.setup: export NAME="$(cat FILE)"' in " ".join(shown.out.split())
    assert "0123456789" not in shown.out + shown.err
    assert not any("0123456789" in each.read_text(errors="replace") for each in workspace.folder.rglob("plan.json"))


@pytest.mark.parametrize(
    "text",
    [
        *('export HF_TOKEN="$(cat ~/.token)"', "export WANDB_API_KEY=$KEY", "TOKENIZERS_PARALLELISM=false"),
        *("prog --eos-token=<eos> --max-token=512", "--json-key text", "export SSH_AUTH_SOCK=/tmp/agent"),
        *("https://host/a:b@c", "--password-file=/home/ann/.pass", "export SECRET_FILE=x", "OLDPWD=/home/ann"),
        *("export DB_PASS=${DB_PASS:?set it}", "export PASSWORD=${PASSWORD:-}", "KEY=/home/ann/key-v2.json"),
        *("AUTHORIZATION='Bearer $TOKEN'", "PGPASSWORD=$(cat ~/.pg)", "export TOKEN=/run/user/1000/token.txt"),
        *("mailto://${USER}:${PASSWORD}@mail?to=a@b.c", "s3://bucket/path", "--pad-token [PAD]", "--sort-key length"),
    ],
)
def test_what_is_no_secret(text: str) -> None:
    assert describe_secret(text) is None


def test_a_secret_of_set_is_not_shown(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(workspace.config("run")), "--set", "cluster.environment.HF_TOKEN=x0123456789"]) == 1
    shown = capsys.readouterr()
    assert "--set cluster.environment.HF_TOKEN" in shown.out
    assert "0123456789" not in shown.out + shown.err


def test_no_config_of_the_repository_holds_what_looks_like_a_secret() -> None:
    files = [path for place in ("configs", "launchers", "examples") for path in (ROOT / place).rglob("*.yaml")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert len(files) > 10
    assert [line for line in lines if describe_secret(line)] == []
