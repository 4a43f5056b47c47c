"""Stands before the training program as a command prefix, and makes it believe that an evaluation takes ages:
`python -m tests.training.long_evaluation -- PYTHON -m relayrun.train ARG...`
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    module = sys.argv.index("relayrun.train")
    sys.argv = sys.argv[module:]
    from relayrun.train.validation import Validation

    Validation.samples = property(lambda self: 10**12)  # type: ignore[assignment]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
