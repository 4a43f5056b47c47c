"""A snapshot holds the code as it is, and a chain runs it whatever becomes of the checkout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm import checkout_state
from relayrun.files import read_json, umask
from relayrun.masking import mask_tokens
from relayrun.submit.code_snapshot import MAX_FILE_BYTES, snapshot_code, snapshot_of_checkout
from relayrun.train.reporting.environment import without_secrets
from relayrun.trust import refuse_untrusted
from tests.readme import break_code, copy_tracked
from tests.waiting import wait_for
from tests.workspace import Workspace, ends, steps


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with a committed, a changed, a new, an ignored, a deleted and a large file, and a link."""
    root = tmp_path / "it's a checkout"
    (root / "package").mkdir(parents=True)
    for name in ("package/kept.py", "package/changed.py", "gone.py"):
        (root / name).write_text("old\n")
    (root / "run.sh").write_text("#!/bin/bash\n")
    (root / "run.sh").chmod(0o755)
    (root / ".gitignore").write_text("ignored/\n")
    (root / "link").symlink_to("package/kept.py")
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (root / "package/changed.py").write_text("new\n")
    (root / "new ünï.py").write_text("new\n")
    (root / "gone.py").unlink()
    (root / "ignored").mkdir()
    (root / "ignored" / "x").write_text("x")
    (root / "data.bin").write_bytes(bytes(MAX_FILE_BYTES + 1))
    return root


def run_dir(folder: Path) -> Run:
    folder.mkdir()
    return Run(folder)


def test_uncommitted_and_new_files_are_in_it(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = snapshot_code(run_dir(tmp_path / "run"), checkout)
    found = {str(path.relative_to(taken)) for path in taken.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert found == {"package/kept.py", "package/changed.py", "new ünï.py", "run.sh", "link", ".gitignore"}
    assert (taken / "package/changed.py").read_text() == "new\n"
    assert os.access(taken / "run.sh", os.X_OK)
    assert os.readlink(taken / "link") == "package/kept.py"
    commit, difference = checkout_state(taken)
    assert commit == checkout_state(checkout)[0]
    assert len(commit) == 40
    assert "-old\n+new" in difference
    assert "too large for code: " in capsys.readouterr().err


def test_the_same_code_is_the_same_snapshot_and_other_code_another(checkout: Path, tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    first = snapshot_code(run, checkout)
    assert snapshot_code(run, checkout) == first
    (checkout / "package/kept.py").write_text("edited\n")
    second = snapshot_code(run, checkout)
    assert (first.name, second.name) == ("0001", "0002")
    assert (first / "package/kept.py").read_text() == "old\n"


def test_ranks_under_a_wide_umask_leave_no_compiled_code_that_their_group_can_exchange(
    checkout: Path, tmp_path: Path
) -> None:
    """The next job refuses what others can write, so `umask 002` in `job.setup` would end the chain."""
    run = run_dir(tmp_path / "run")
    taken = snapshot_code(run, checkout)
    (taken / "package/kept.py").write_text("kept = True\n")
    names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = ["sh", "-c", 'umask 002; exec "$@"', "sh", sys.executable, "-c", "import package.kept"]
    subprocess.run(command, cwd=taken, env=environment, check=True)
    assert list((taken / "package/__pycache__").glob("kept.*.pyc"))
    refuse_untrusted(run.path, (), trees=["code"])


KILLED = """
import os, signal, sys
from pathlib import Path
from relayrun.control.rundir.run import Run
from relayrun.submit import code_snapshot
code_snapshot._copy = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
code_snapshot.snapshot_code(Run(Path(sys.argv[1])), Path(sys.argv[2]))
"""


def test_what_a_killed_submit_left_of_a_snapshot_goes_with_the_next(checkout: Path, tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run.path), str(checkout)], check=False, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(run.code)) == 1
    snapshot_code(run, checkout)
    assert sorted(os.listdir(run.code)) == ["0001", "0001.commit", "0001.diff", "0001.sha256"]


def test_a_folder_without_git_gives_its_code(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("relayrun/cli/__init__.py", "relayrun/__pycache__/cli.pyc", "launchers/lib/job.sh", "data/tokens.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    taken = snapshot_code(run_dir(tmp_path / "run"), root)
    assert {str(path.relative_to(taken)) for path in taken.rglob("*.*")} == {
        "relayrun/cli/__init__.py",
        "launchers/lib/job.sh",
    }


SECRETS = (".env", ".env.local", ".netrc", "conf/prod.env", "id_ed25519", "tls/server.key", "ca.pem", ".aws/config")
SECRETS += ("credentials.json", "hf_token", "my-secrets.yaml", ".huggingface/token", "service_account_1.json")
NONE = (".env.example", "secrets.py", "tokens.md", "tokenizer.json", "token_bucket.py", "key.py", "tokens/a.txt")
GITHUB, HUB, AWS, WANDB = "ghp_" + "a1B2" * 9, "hf_" + "Ab" * 17, "AKIA" + "Q7" * 8, "0a1b" * 10
"""Built here: nothing in this file has the form of a token."""


def test_what_looks_like_a_secret_is_left_out_and_named(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*SECRETS, *NONE, "ignored/.env"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("x\n")
    taken = snapshot_code(run_dir(tmp_path / "run"), checkout)
    said = capsys.readouterr().err
    for name in SECRETS:
        assert not (taken / name).exists(), name
        assert f"its name is that of a secret: {checkout / name}\n" in said
    assert all((taken / name).exists() for name in NONE)
    assert "ignored" not in said
    assert not (taken / "ignored").exists()


def test_without_git_too(tmp_path: Path) -> None:
    for name in ("relayrun/cli/__init__.py", "configs/.env", "scripts/id_rsa"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text("x")
    taken = snapshot_code(run_dir(tmp_path / "run"), tmp_path / "root")
    assert [str(path.relative_to(taken)) for path in taken.rglob("*") if path.is_file()] == ["relayrun/cli/__init__.py"]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f"TOKEN = '{GITHUB}'", "GitHub token"),
        (f"login({HUB!r})", "Hugging Face token"),
        (f"export AWS_ACCESS_KEY_ID={AWS}", "AWS key"),
        (f"aws_secret_access_key = {'aB/+' * 10}", "AWS key"),
        (f"WANDB_API_KEY={WANDB}", "W&B key"),
        (f"wandb.login(key='{WANDB}')", "W&B key"),
        (f"machine w login user password {WANDB}", "W&B key"),
        ("-----BEGIN OPENSSH " + "PRIVATE KEY-----\nabc", "private key"),
    ],
)
def test_a_token_in_the_code_is_masked_in_the_difference_and_kept_from_others(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, kind: str
) -> None:
    (checkout / "package/changed.py").write_text(f"new\n{line}\n")
    (checkout / "new.py").write_text(f"{line}\n")
    taken = snapshot_code(run_dir(tmp_path / "run"), checkout)
    difference = taken.with_suffix(".diff")
    assert f"<{kind}>" in difference.read_text()
    assert difference.stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr().err
    assert f"masked in the difference to the commit: {kind}" in said
    for name in ("package/changed.py", "new.py"):
        assert (taken / name).stat().st_mode & 0o777 == 0o600
        assert f"readable by you alone: {checkout / name} holds what looks like a {kind}" in said
    assert (taken / "package/kept.py").stat().st_mode & 0o777 == 0o644 & ~umask()
    assert mask_tokens(difference.read_text()) == (difference.read_text(), [])
    assert kind in without_secrets(line, {})


def test_names_of_commits_are_no_keys() -> None:
    text = f"commit {WANDB}\nindex 0a1b0a1b..1\n - uses: thing@{WANDB}\n sha256: {'0a1b' * 16}\n"
    assert mask_tokens(text) == (text, [])


@pytest.mark.parametrize("mask", [0o077, 0o027])
def test_nothing_is_wider_than_the_umask(checkout: Path, tmp_path: Path, mask: int) -> None:
    (checkout / "run.sh").chmod(0o777)
    before = os.umask(mask)
    try:
        run = run_dir(tmp_path / "run")
        snapshot_code(run, checkout)
    finally:
        os.umask(before)
    wide = [path for path in run.code.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o777 & mask]
    assert not wide
    assert os.access(run.code / "0001/run.sh", os.X_OK)


@pytest.mark.slow
@pytest.mark.long
def test_a_checkout_that_breaks_under_a_running_chain_does_not_break_its_next_job(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    copy_tracked(root)
    workspace = Workspace.make(tmp_path)
    config = workspace.config(
        "run",
        training={"steps": 40_000},
        data={"max_epochs": 1e6},
        checkpoint={"interval": 40_000},
        job={"ntasks_per_node": 1},
        debug={"backup_codebase": True},
    )
    run = workspace.run("run")
    submit = [sys.executable, "-m", "relayrun.cli", "submit", str(config)]
    process = subprocess.Popen(
        submit, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True
    )

    def begun(attempt: int) -> bool:
        assert process.poll() is None, process.communicate(timeout=300)
        return run.attempt(attempt).metrics.exists()

    try:
        wait_for(lambda: begun(1), words="attempt 1 has done a step")
        break_code(root)
        os.kill(read_json(run.path / "local/job-0001.json")["pid"], signal.SIGUSR2)
        wait_for(lambda: begun(2), words="attempt 2 has done a step")
        (run.triggers / "exit").touch()
        process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    assert sorted(steps(run)) == list(range(1, len(steps(run)) + 1))
    begin = AttemptStart.read(run.attempt(2).begin)
    assert begin is not None
    assert begin.base_iteration > 0
    assert "code/0001" in (run.debug_of(2) / "compute_environment.txt").read_text()


def test_a_checkout_of_megatron_lm_is_taken_whole_and_once(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_dir(tmp_path / "run")
    taken = snapshot_of_checkout(run, checkout)
    assert taken == run.code / "megatron-lm" / "0001"
    assert (taken / "package/kept.py").read_text() == (checkout / "package/kept.py").read_text()
    assert snapshot_of_checkout(run, checkout) == taken
    (checkout / "package/changed.py").write_text("newer\n")
    assert snapshot_of_checkout(run, checkout).name == "0002"
    assert "newer" in (taken.parent / "0002.diff").read_text()


def test_of_a_folder_without_git_everything_is_taken_but_secrets_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "Megatron-LM"
    for name in ("pretrain_gpt.py", "megatron/core/datasets/Makefile", "megatron/core/__pycache__/x.pyc", ".env"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / "tokens.bin").write_bytes(bytes((1 << 20) + 1))
    taken = snapshot_of_checkout(run_dir(root / "run"), root)
    found = {str(path.relative_to(taken)) for path in taken.rglob("*") if path.is_file()}
    assert found == {"pretrain_gpt.py", "megatron/core/datasets/Makefile"}
    assert taken.with_suffix(".commit").read_text().startswith("unknown")
    said = capsys.readouterr().err
    assert "too large for code" in said
    assert "its name is that of a secret" in said
