"""`relayrun upload`: an exported folder to the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.train.export import upload


def add_upload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun upload`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="that `relayrun export hf` wrote")
    parser.add_argument(
        "repository", metavar="OWNER/NAME", help="of the hub; made if it is not there, closed to others"
    )
    parser.add_argument("--public", action="store_true", help="a repository that is made is open to all")
    parser.add_argument("--revision", metavar="BRANCH", help="made if it is not there (default: main)")
    parser.set_defaults(run=upload_folder)


def upload_folder(options: argparse.Namespace) -> int:
    """Upload a folder, in one commit. Raises RelayrunError."""
    hub = upload.HubRepository.from_environment(options.repository)
    print(upload.upload_to_hub(hub, options.folder, public=options.public, revision=options.revision))
    return 0
