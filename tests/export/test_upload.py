"""An exported folder to a stand-in for the hub: one commit, what has arrived is not sent again, the token nowhere."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayrun.cli import main
from tests.export.models import make_hf, make_run
from tests.receivers import HubServer, hub_server

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # huggingface_hub 2.4 and httpx
]

TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    made = make_run(folder / "run", make_hf(folder / "hf"))
    command = ["export", "hf", str(made.run.path), "--output", str(folder / "out"), "--max-shard-size", "200KB"]
    assert main(command) == 0
    return folder / "out"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    from huggingface_hub import constants, file_download  # noqa: F401 - its own warnings come here

    with hub_server(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        yield server


def digests(folder: Path) -> dict[str, str]:
    """Hashes of what an upload sends: hidden files stay here."""
    shown = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shown}


def of_commit(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_an_upload_that_was_interrupted_sends_only_the_rest(
    exported: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    files = digests(exported)
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(weights) > 2
    hub.refuse = {files[weights[-1]]}
    assert main(["upload", str(exported), "my-lab/my-model"]) == 1
    said = capsys.readouterr()
    assert "error: my-lab/my-model: the hub has not taken it: " in said.err
    assert "sends what the hub has not got yet" in said.err
    assert hub.commits == [], "whole or not at all"
    hub.refuse, hub.sent = set(), []
    assert main(["upload", str(exported), "my-lab/my-model"]) == 0
    said = capsys.readouterr()
    assert hub.sent == [files[weights[-1]]]
    ((name, branch, found),) = hub.commits
    assert (name, branch) == ("my-lab/my-model", "main")
    assert of_commit(found) == files
    assert hub.repositories == {"my-lab/my-model": True}, "closed to others unless asked for"
    assert f"{len(files)} files, " in said.out
    assert f"{hub.url}/my-lab/my-model/commit/" in said.out
    assert TOKEN not in said.out + said.err


def test_a_branch_and_a_repository_for_all(exported: Path, hub: HubServer) -> None:
    assert main(["upload", str(exported), "my-lab/open", "--public", "--revision", "step-7"]) == 0
    assert hub.repositories == {"my-lab/open": False}
    assert hub.branches == {"step-7"}
    assert [(name, branch) for name, branch, _ in hub.commits] == [("my-lab/open", "step-7")]


def test_an_export_is_pushed(
    exported: Path, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported.parent / "run"
    assert main(["export", "hf", str(run), "--output", str(tmp_path / "out"), "--push-to", "my-lab/pushed"]) == 0
    ((_, _, found),) = hub.commits
    assert of_commit(found) == digests(tmp_path / "out")
    everything = b"".join(found.values()) + b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err
    assert everything.find(TOKEN.encode()) == -1


def test_nothing_is_made_where_the_hub_would_not_take_it(
    exported: Path,
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, out = exported.parent / "run", tmp_path / "out"
    push = ["export", "hf", str(run), "--output", str(out), "--push-to"]
    assert main([*push, "no-owner"]) == 1
    assert "'no-owner' is no repository" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    assert main([*push, "my-lab/my-model"]) == 1
    said = capsys.readouterr().err
    assert "the hub has not taken it: " in said
    assert TOKEN not in said
    monkeypatch.delenv("HF_TOKEN")
    assert main([*push, "my-lab/my-model"]) == 1
    assert "there is no token to write to it with" in capsys.readouterr().err
    assert main(["export", "hf", str(run), "--output", str(out), "--public"]) == 1
    assert "--public belongs to --push-to" in capsys.readouterr().err
    assert not out.exists()
    assert (hub.commits, hub.sent) == ([], [])


def test_only_an_exported_folder_without_secrets_goes(
    exported: Path, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["upload", str(tmp_path), "my-lab/my-model"]) == 1
    assert "no exported folder: it has no config.json" in capsys.readouterr().err
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    (copy / "token").write_text(TOKEN)
    assert main(["upload", str(copy), "my-lab/my-model"]) == 1
    said = capsys.readouterr().err
    assert "this looks like a secret by its name" in said
    assert TOKEN not in said
    assert (hub.commits, hub.sent, hub.repositories) == ([], [], {})


def test_the_token_does_not_show_in_what_is_printed_of_it(hub: HubServer) -> None:
    from relayrun.train.export.upload import HubRepository

    assert TOKEN not in repr(HubRepository.from_environment("my-lab/my-model"))
