"""`killed_by_itself.py SEED KILLS PROGRAM ...`: its first starts end by SIGKILL behind their first save."""

import os
import random
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from tests.waiting import wait_for


def kill(moment: float) -> None:
    saves = Path(os.environ["RELAYRUN_CLIENT"]) / "checkpoints.jsonl"
    wait_for(lambda: saves.exists() and saves.stat().st_size > 0, 600)
    time.sleep(moment)
    os.kill(os.getpid(), signal.SIGKILL)


seed, kills = int(sys.argv[1]), int(sys.argv[2])
attempt = int(Path(os.environ["RELAYRUN_CLIENT"]).parent.name)
if attempt <= kills:
    moment = random.Random(f"{seed} {attempt}").uniform(0, 0.3)
    threading.Thread(target=kill, args=(moment,), daemon=True).start()
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
