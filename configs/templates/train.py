"""A program that may be cut anywhere and goes on exactly (`relayrun help command`). Put your training into its loop."""

import json
import os
import sys
import time

from relayrun.client import checkpoint, checkpoint_done, should_leave, should_save, step_done

folder, last = sys.argv[1], int(sys.argv[2])
state = {"iteration": 0, "loss": 1.0}
if (path := checkpoint()) is not None:
    with open(path, encoding="utf-8") as file:
        state = json.load(file)

for iteration in range(int(state["iteration"]) + 1, last + 1):
    time.sleep(0.02)
    state = {"iteration": iteration, "loss": state["loss"] * 0.99}
    step_done(iteration, loss=state["loss"])
    leave = should_leave()  # once for each iteration: the answer changes in between
    if leave or should_save() or iteration % 50 == 0 or iteration == last:
        path = os.path.join(folder, f"step-{iteration}.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(path + ".new", path)
        checkpoint_done(iteration, path)
    if leave:
        break
