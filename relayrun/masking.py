"""Forms of secrets: names of files, and tokens that are known by their form.

Neither list is complete. They keep common secrets of a checkout out of run directories, which others may read.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_NAMES = re.compile(
    r"""\.env(\.(?!example$|sample$|template$|dist$).*)? | .*\.env
    | [._]netrc | \.git-credentials | \.npmrc | \.pypirc | \.pgpass | \.htpasswd | \.boto | \.s3cfg
    | id_(rsa|dsa|ecdsa|ed25519)(_sk)? | .*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|token)
    | (.*[._-])?(credentials?|secrets?|tokens?|passwords?|api[._-]?keys?)(\.(json|ya?ml|toml|ini|cfg|conf|txt|csv))?
    | service[._-]?account.*\.json""",
    re.IGNORECASE | re.VERBOSE,
)
_FOLDERS = frozenset({".aws", ".azure", ".config", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kube", ".ssh"})

TOKEN_FORMS = {
    "GitHub token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}",
    "GitLab token": r"glpat-[A-Za-z0-9_-]{20,}",
    "Hugging Face token": r"(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "AWS key": r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Z])"
    r"|(?i:(?<=secret_access_key)|(?<=secretaccesskey))[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}",
    "W&B key": r"wandb_v1_[A-Za-z0-9_]{40,}"
    # as long as a commit's name, so only behind what says that it is a key
    r"|(?i:(?<=wandb_api_key)|(?<=wandb.login)|(?<=password)|(?<=api_key))[\"']?[\s=:(\"']{1,5}(?:key=)?[\"']?[0-9a-f]{40}\b",
    "private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[\s\S]*?(?:-----END (?:[A-Z]+ )*PRIVATE KEY-----|\Z)",
}
"""Patterns of tokens, by kind."""

_TOKEN = re.compile("|".join(f"(?P<_{number}>{form})" for number, form in enumerate(TOKEN_FORMS.values())))
_KINDS = list(TOKEN_FORMS)


def is_secret_name(name: str) -> bool:
    """Return whether a file of this name, a path with slashes, is likely to hold only secrets; code never is."""
    path = PurePosixPath(name)
    return bool(_NAMES.fullmatch(path.name)) or not _FOLDERS.isdisjoint(path.parts[:-1])


def mask_tokens(text: str) -> tuple[str, list[str]]:
    """Return `text` with every token replaced by its kind in angle brackets, and the kinds."""
    found: list[str] = []

    def replace(match: re.Match[str]) -> str:
        assert match.lastgroup is not None
        found.append(_KINDS[int(match.lastgroup[1:])])
        return f"<{found[-1]}>"

    return _TOKEN.sub(replace, text), found
