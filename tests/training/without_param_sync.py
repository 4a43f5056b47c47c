"""Stands before the training program as a command prefix, and takes away the synchronization of parameters that
comes before a save: `python -m tests.training.without_param_sync -- PYTHON -m relayrun.train ARG...`
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


def main() -> None:
    module = sys.argv.index("relayrun.train")
    sys.argv = sys.argv[module:]
    from relayrun.train.model.gpt import DistributedDataParallel

    original = DistributedDataParallel.start_param_sync

    def without_force(self: Any, *arguments: Any, force_sync: bool = False, **options: Any) -> None:
        if not force_sync:
            original(self, *arguments, **options)

    DistributedDataParallel.start_param_sync = without_force
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
