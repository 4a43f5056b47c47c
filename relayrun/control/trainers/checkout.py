"""Which code an attempt runs: commit and difference of a checkout of Megatron-LM, on record.

A snapshot (`code/megatron-lm/0001/`) has both beside it. Elsewhere git is asked; what it cannot say is said so, since
no attempt is to fail for it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from relayrun.files import write_atomic
from relayrun.masking import mask_tokens

GIT_SECONDS = 20.0
"""How long one question to git may take: a job's begin waits for it."""


def record_checkout(checkout: Path, target: Path) -> None:
    """Write commit and difference of a checkout to a file for its owner alone. Raises OSError."""
    commit, difference = checkout_state(checkout)
    text = f"== code\n{checkout}\ncommit {commit}\n\n== difference to the commit\n{difference.rstrip() or 'none'}\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, mask_tokens(text)[0].encode(errors="surrogateescape"), mode=0o600, durable=False)


def checkout_state(checkout: Path) -> tuple[str, str]:
    """Commit and difference of a checkout, or why one is not known."""
    commit, difference = checkout.with_suffix(".commit"), checkout.with_suffix(".diff")
    if commit.is_file():
        return commit.read_text(encoding="utf-8").strip(), _file_text(difference)
    if not (checkout / ".git").exists():
        return "unknown: this is no git checkout", "unknown"
    return (
        _git_output(checkout, "rev-parse", "HEAD").strip(),
        _git_output(checkout, "diff", "--no-ext-diff", "--no-textconv", "HEAD"),
    )


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        return f"unknown: {error.strerror}"


def _git_output(checkout: Path, *words: str) -> str:
    """What git prints; why it prints nothing where it fails."""
    command = ["git", "-C", str(checkout), *words]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # nothing is written into somebody's checkout
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    if done.returncode:
        return f"unknown: {done.stderr.decode(errors='replace').strip()}"
    return done.stdout.decode(errors="surrogateescape")
