"""Upload of an exported folder to a repository of the Hugging Face hub, whole or not at all, and only on request.

All files become one commit. Weights are sent first, one by one, and the hub keeps them: a second call after an
interruption sends only the rest. huggingface_hub finds the token (`HF_TOKEN`, or the login of `hf auth login`), which
appears in no option, file or message.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from relayrun.errors import ConfigError, InputError, on_interrupt
from relayrun.masking import is_secret_name, mask_tokens
from relayrun.publishing import InputFiles
from relayrun.terminal import raw_stream

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")


@dataclass(frozen=True)
class HubRepository:
    """A repository of models, with the credentials for it."""

    repository: str
    endpoint: str | None
    """Another hub than huggingface.co (`HF_ENDPOINT`)."""
    token: str = field(repr=False)

    @classmethod
    def from_environment(cls, repository: str) -> HubRepository:
        """Return the repository with the user's token, without a request to the hub. Raises ConfigError without a
        token, or without the package."""
        if _REPOSITORY.fullmatch(repository) is None:
            raise ConfigError(
                f"{repository!r} is no repository", where="the hub", hint="write OWNER/NAME, as in my-lab/my-model"
            )
        try:
            from huggingface_hub import constants, get_token
        except ImportError as error:
            raise ConfigError(
                f"huggingface_hub cannot be imported: {error}", where="the hub", hint="pip install 'relayrun[train]'"
            ) from None
        if constants.HF_HUB_OFFLINE:
            raise ConfigError("HF_HUB_OFFLINE is set: nothing can be uploaded", where="the hub", hint="unset it")
        token = get_token()
        if not token:
            raise ConfigError(
                "there is no token to write to it with",
                where="the hub",
                hint="set HF_TOKEN in this shell's environment, or run `hf auth login`",
            )
        return cls(repository, os.environ.get("HF_ENDPOINT"), token)

    def check(self) -> None:
        """Ask the hub for the owner of the token. Raises InputError if the token is unknown or the hub out of reach."""
        with _one_error(self):
            self.api().whoami()

    def api(self) -> HfApi:
        """Return huggingface_hub's client."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)


@on_interrupt(lambda: "the hub keeps what it has got; the same command sends the rest")
def upload_to_hub(hub: HubRepository, folder: Path, *, public: bool = False, revision: str | None = None) -> str:
    """Upload a folder of transformers in one commit; return a report. A missing repository is created, private unless
    `public`, and so is the branch `revision`. Raises InputError if this is no such folder, if a file looks like a
    secret or changes before the commit, or if the hub refuses or fails."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils.tqdm import disable_progress_bars

    files = list(_files(folder))
    read = InputFiles(folder / name for name in files)
    size = sum((folder / name).stat().st_size for name in files)
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _one_error(hub, read), redirect_stderr(raw_stream(sys.stderr)):  # bars move the cursor
        api = hub.api()
        api.create_repo(hub.repository, private=not public, exist_ok=True)
        if revision is not None:
            api.create_branch(hub.repository, branch=revision, exist_ok=True)
        changes = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files]
        api.preupload_lfs_files(hub.repository, changes, revision=revision)
        read.check()
        made = api.create_commit(
            hub.repository,
            changes,
            commit_message=f"Upload {folder.absolute().name} with relayrun",
            revision=revision,
        )
    return f"{len(files)} files, {size:,} bytes: {made.commit_url}"


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of the files to upload, relative to the folder: all but hidden ones."""
    if not (folder / "config.json").is_file():
        raise InputError(
            "this is no exported folder: it has no config.json",
            where=folder,
            hint="give a folder that `relayrun export hf` wrote",
        )
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in name.split("/")) or path.is_dir():
            continue
        if is_secret_name(name):
            raise InputError("this looks like a secret by its name", where=path, hint="move it out of the folder")
        yield name


@contextmanager
def _one_error(hub: HubRepository, read: InputFiles | None = None) -> Iterator[None]:
    """Turn any error of huggingface_hub into InputError, without the token, or into that of a file that changed."""
    try:
        yield
    except Exception as error:  # of httpx, of the hub, of the disk: each release has others
        if read is not None:
            read.check()
        said = [str(each).strip().partition("\n")[0] for each in _causes(error)]
        words = "; ".join(dict.fromkeys(filter(None, said))) or type(error).__name__
        words = mask_tokens(words.replace(hub.token, "<token>"))[0]
        raise InputError(
            f"the hub has not taken it: {words}",
            where=hub.repository,
            hint="when that is mended, `relayrun upload FOLDER OWNER/NAME` sends what the hub has not got yet",
        ) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
