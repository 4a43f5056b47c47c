"""What the Bash launchers call: `python -m relayrun.tokens.tokenize begin | record | run DUMP`.

Settings come from the environment, see `job_config.ENVIRONMENT_SETTINGS`.

    begin    check the settings, make the folders; print, a line each, the folder of the jobs' logs, the name
             of the jobs, and the numbers of the dumps to submit
    record   remember which Slurm jobs tokenize which dumps: lines `JOB DUMP` from the standard input, as they come
    run      tokenize dump DUMP here
"""

from __future__ import annotations

import argparse
import os
import sys

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import run_main
from relayrun.tokens.tokenize.dump_jobs import prepare_submission, tokenize_dump
from relayrun.tokens.tokenize.dumps import MetadataFolder
from relayrun.tokens.tokenize.job_config import settings_from_environment


def main() -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(prog="python -m relayrun.tokens.tokenize", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("begin")
    commands.add_parser("record")
    run = commands.add_parser("run")
    run.add_argument("dump", type=int)
    options = parser.parse_args()
    settings = settings_from_environment(os.environ)
    metadata = MetadataFolder(settings.metadata_folder)
    if options.command == "begin":
        check_outputs({name: getattr(settings, name) for name in ("metadata_folder", "output_folder", "logs")})
        with metadata.hold():
            metadata.refuse_live_jobs()
            indices = prepare_submission(settings)
        print(settings.job_logs, settings.name, *indices, sep="\n")
    elif options.command == "record":
        for line in sys.stdin:
            job, dump = line.split()
            metadata.record_job(job, int(dump))
            print(f"dump {dump}: Slurm job {job}", flush=True)
    else:
        tokenize_dump(settings, options.dump)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
