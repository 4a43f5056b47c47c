"""`python -m relayrun.training --run-dir R --attempt N`, one process per rank.

Exit codes: 0 done, saved or exit; 3 fatal (another attempt would fail in the same way); 1 anything else.
Rank 0 leaves `outcome.json`, written last; only with code 1 there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

from relayrun.errors import ConfigError, FatalTrainingError, RelayrunError
from relayrun.rundir.layout import RunDir
from relayrun.rundir.records import Begin, Left, commits
from relayrun.training.signals import SignalFlag

FATAL = 3


def main(flag: SignalFlag) -> int:
    parser = argparse.ArgumentParser(prog="python -m relayrun.training", description="Train one attempt on this rank.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.absolute())
    attempt = run.attempt(arguments.attempt)
    base = 0
    try:
        begin = Begin.read(attempt.begin)
        if begin is None:
            raise RelayrunError("this attempt has not begun", where=attempt.begin)
        base = begin.base_iteration
        # what these two say to their own authors, at every import, config and save
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\.")
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        from relayrun.training.loop import train  # imports torch and megatron-core: seconds

        train(run, begin, flag)
    except (FatalTrainingError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        if os.environ["RANK"] == "0":
            saved = [commit.iteration for commit in commits(attempt)]
            left = Left(outcome="fatal", reason=str(error), iteration=max(saved, default=base), time=time.time())
            left.write(attempt.outcome)
        return FATAL
    except RelayrunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    flag = SignalFlag()
    flag.install()
    code = main(flag)
    sys.stdout.flush()
    sys.stderr.flush()
    # no waiting for threads and process groups: a rank that failed must end, so that the others are ended too
    os._exit(code)
