"""Put before the training program: it waits for its feeds however busy the machine is, not LEAVE_SECONDS."""

from __future__ import annotations

import runpy
import sys

from relayrun.train.reporting import attempt_hooks

attempt_hooks.LEAVE_SECONDS = 600.0
module = sys.argv.index("-m") + 1
sys.argv = sys.argv[module:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
