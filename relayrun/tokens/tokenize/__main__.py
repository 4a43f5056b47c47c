"""Commands of the Bash scripts: `python -m relayrun.tokens.tokenize COMMAND`.

    begin               check the settings, make the folders; print, a line each, the folder of the jobs' logs, the name
                        of the jobs, and the numbers of the dumps to submit
    record              record which Slurm jobs tokenize which dumps: lines `JOB DUMP` from the standard input
    run DUMP            tokenize dump DUMP here
    merges DATASET      check the shards of all dumps; print, a line each, the names of the dumps to merge
    site CLUSTER FILE   write the site settings of the jobs, see `job_config.write_site_shell_file`

The first three take their settings from the environment, see `job_config.ENVIRONMENT_SETTINGS`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import run_main
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import DumpsFolder, unmerged_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings, settings_from_environment, write_site_shell_file


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m relayrun.tokens.tokenize", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("begin")
    commands.add_parser("record")
    commands.add_parser("run").add_argument("dump", type=int)
    commands.add_parser("merges").add_argument("dataset", type=os.path.abspath)
    site = commands.add_parser("site")
    site.add_argument("cluster")
    site.add_argument("file", type=os.path.abspath)
    options = parser.parse_args()
    if options.command == "site":
        write_site_shell_file(options.cluster, Path(options.file))
    elif options.command == "merges":
        for name in unmerged_dumps(Path(options.dataset)):
            print(name)
    elif options.command == "run":
        tokenize_dump(settings_from_environment(os.environ), options.dump)
    else:
        {"begin": _begin, "record": _record}[options.command](settings_from_environment(os.environ))
    return 0


def _begin(settings: TokenizationSettings) -> None:
    metadata = DumpsFolder(settings.metadata_folder)
    check_outputs(settings.outputs)
    with metadata.hold():
        metadata.refuse_live_jobs()
        indices = prepare_submission(settings)
    print(settings.job_output_files, settings.name, *indices, sep="\n")


def _record(settings: TokenizationSettings) -> None:
    metadata = DumpsFolder(settings.metadata_folder)
    for line in sys.stdin:
        job, dump = line.split()
        metadata.record_job(job, int(dump))
        print(f"dump {dump}: Slurm job {job}", flush=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
