"""`python -m relayrun` is the command `relayrun`."""

import sys

from relayrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
