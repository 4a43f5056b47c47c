"""The real fork server with a stand-in for the program of its ranks: `forked_ranks.py FAULT ...`, no torch.

The stand-in keeps the contract of the training program: it counts steps from its base, commits an empty folder every
SAVE steps and at the end, and leaves at a stop file, a signal or its deadline.

FAULT is `ROUND:RANK:ITERATION:WHAT`: in that restart that rank meets WHAT when all stand at that iteration, and the
others wait there as in a collective. WHAT is a signal's name, `exit3`, `server` (the fork server is killed), `told`
(all wait: somebody else acts), or else the words of an error. `worker+WHAT` forks a process first that lives on, as one
that reads data may; `worker-NUMBER-RANK` has its id. Restart 0 is every restart. `imports:WORDS` has the imports
fail; `imports:hang` has them last for ever.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from relayrun.control.rundir import triggers
from relayrun.control.rundir.records import AttemptOutcome, CheckpointCommit, Heartbeat, RankFailure
from relayrun.control.rundir.run import Run
from relayrun.errors import log_to_stderr
from relayrun.files import append_line
from relayrun.train import __main__ as program
from relayrun.train import fork_server
from relayrun.train.reporting import liveness
from relayrun.train.requests import SignalFlag, dump_stacks_on_request

SAVE = 5
STEPS = 20
STEP_SECONDS = 0.02


def rank_main(flag: SignalFlag) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--base-iteration", type=int)
    parser.add_argument("--base-path")
    options = parser.parse_args()
    run = Run(options.run_dir)
    attempt = run.attempt(options.attempt)
    begin = attempt.read_begin()
    assert begin is not None
    rank, number, world = int(os.environ["RANK"]), liveness.restart_number(), int(os.environ["WORLD_SIZE"])
    assert (os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]) == (str(rank), str(world))
    dump_stacks_on_request(run.stacks(options.attempt) / f"rank-{rank:04}.txt")
    base = begin.base_iteration if options.base_iteration is None else options.base_iteration
    append_line(attempt.path / f"starts-{rank}.jsonl", {"restart": number, "base": base, "pid": os.getpid()})
    now = time.time()
    if rank == 0:
        liveness.tell_agent("started", process=now, imported=now, initialised=now, loaded=now)
    at = base
    while True:
        fault(number, rank, at, run, options.attempt)
        reason = flag.received.name if flag.received else "stop file" if attempt.stop.exists() else ""
        trigger = triggers.read_trigger(run, "exit")
        if begin.job_end_time is not None and time.time() > begin.job_end_time - begin.grace_period:
            reason = reason or "time limit near"
        done = at >= STEPS
        if rank and attempt.outcome.exists():  # rank 0 looks, the others follow
            return 0
        if rank == 0:
            leaves = bool(done or reason or trigger)
            if at > base and (at % SAVE == 0 or leaves):
                run.checkpoint(at).mkdir(parents=True, exist_ok=True)
                path = str(run.checkpoint(at))
                attempt.append_commit(
                    CheckpointCommit(iteration=at, path=path, consumed_samples=at, time=time.time(), seconds=0.0)
                )
            if leaves:
                words = "exit trigger" if trigger else reason or "last step"
                name = "exit" if trigger else "done" if done else "saved"
                outcome = AttemptOutcome(outcome=name, reason=words, iteration=at, time=time.time())  # type: ignore[arg-type]
                outcome.write(attempt.outcome)
                if trigger:
                    triggers.acknowledge_trigger(run, trigger, iteration=at, result="saved")
                return 0
        time.sleep(STEP_SECONDS)
        if rank == 0 or not done:
            at += 1
        if rank == 0:
            append_line(attempt.metrics, {"iteration": at, "round_of_test": number}, durable=False)
            beat = Heartbeat(node="n", iteration=at, phase="step", time=time.time(), step_p95=None, save_p95=None)
            beat.write(attempt.heartbeats / "n.json")
            if at == base + 1:
                liveness.tell_agent("stepped", time=time.time())


def fault(number: int, rank: int, at: int, run: Run, attempt: int) -> None:
    for text in sys.orig_argv[2:]:
        if text.startswith("imports:"):
            continue
        where, culprit, iteration, what = text.split(":", 3)
        if where not in ("0", str(number)) or int(iteration) != at or attempt > 1:
            continue
        (run.attempt(attempt).path / f"at-{number}-{at}-{rank}").touch()
        if rank == int(culprit):
            while len(list(run.attempt(attempt).path.glob(f"at-{number}-{at}-*"))) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.01)
            if what.startswith("worker+"):
                what = what.removeprefix("worker+")
                if (pid := os.fork()) == 0:
                    time.sleep(1000)
                    os._exit(0)
                (run.attempt(attempt).path / f"worker-{number}-{rank}").write_text(str(pid))
            if what.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[what])
            elif what == "server":
                os.kill(os.getppid(), signal.SIGKILL)
            elif what == "exit3":
                os._exit(3)
            elif what != "told":
                error = RankFailure(
                    rank=rank, node="n", error=what, time=time.time(), repeats=what.startswith("repeats")
                )
                error.write(run.attempt(attempt).failures / f"rank-{rank:04}.json")
                os._exit(1)
        while what != "told" or not run.attempt(attempt).stop.exists():
            time.sleep(0.05)  # as in a collective with a rank that is no more


def imports() -> None:
    for text in sys.orig_argv[2:]:
        if text == "imports:hang":
            time.sleep(1000)
        if text.startswith("imports:"):
            raise ModuleNotFoundError(text.removeprefix("imports:"))


if __name__ == "__main__":
    log_to_stderr()
    program.main = rank_main
    fork_server.import_program = imports
    fork_server.read_config = lambda _run: None
    fork_server.TrainingForkServer.load_plan = lambda _server: SimpleNamespace(gpus_per_node=0)  # it has no plan
    sys.argv = [sys.argv[0], "--run-dir=."]
    code = fork_server.main()
    os._exit(code)
