"""`python -m relayrun.cli`: the `relayrun` command if it is not on PATH."""

import sys

from relayrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
