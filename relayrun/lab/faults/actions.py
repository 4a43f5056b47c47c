"""Actions on a training chain while it runs; the table assigns them to faults."""

from __future__ import annotations

import os
import shutil
import signal

from relayrun.control.rundir import triggers
from relayrun.lab.faults.target import FaultTarget, wrapper_marker


def do_nothing(_stage: FaultTarget) -> None:
    pass


def kill_rank(stage: FaultTarget) -> None:
    """Send SIGKILL to rank 1 after iteration 15, when there is a checkpoint to resume from."""
    stage.wait_iteration(15)
    stage.signal_ranks(signal.SIGKILL, 1)


def kill_batch_script(stage: FaultTarget) -> None:
    """Send SIGKILL to the batch script after iteration 15; the ranks stay alive."""
    stage.wait_iteration(15)
    stage.signal_batch(signal.SIGKILL)


def kill_batch_script_under_guard(stage: FaultTarget) -> None:
    """Send SIGKILL to the batch script once the guard of the first attempt watches it."""
    guard = stage.run.attempt(1).guard_log
    stage.wait(lambda: guard.exists() and guard.stat().st_size)
    kill_batch_script(stage)


def stop_rank(stage: FaultTarget) -> None:
    """Send SIGSTOP to rank 1 after iteration 15, so that the others hang in their next collective."""
    stage.wait_iteration(15)
    stage.signal_ranks(signal.SIGSTOP, 1)


def kill_while_staging(stage: FaultTarget) -> None:
    """Send SIGKILL to all ranks between the last byte of the checkpoint of iteration 20 and its publication."""
    staged = stage.run.staging(1) / "iter_0000020"
    stage.wait(lambda: (staged / "metadata.json").exists())
    stage.signal_ranks(signal.SIGKILL)


def cancel(stage: FaultTarget) -> None:
    """Cancel the running job by its id after iteration 15, as its owner would."""
    stage.wait_iteration(15)
    stage.order("scancel", stage.job_id())


def cancel_after_killing_the_batch_script(stage: FaultTarget) -> None:
    """Cancel the running job and kill its batch script, which never sees the cancel."""
    stage.wait_iteration(15)
    job = stage.job_id()
    stage.signal_batch(signal.SIGSTOP)  # so it does not see the cancel
    stage.order("scancel", job)
    stage.signal_batch(signal.SIGKILL)


def tear_latest(stage: FaultTarget) -> None:
    """Truncate the newest checkpoint while the job dies, so that the next job finds it damaged."""
    stage.wait(lambda: stage.run.checkpoint(20).is_dir())
    victim = max(stage.run.checkpoint(20).glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    stage.signal_ranks(signal.SIGKILL)
    stage.must(not stage.run.checkpoint(30).exists(), "a newer checkpoint than the torn one was saved meanwhile")
    stage.hurry()


def lose_tracker(stage: FaultTarget) -> None:
    """Remove latest_checkpointed_iteration.txt after the first save, and kill rank 0."""
    stage.wait(stage.run.tracker.exists)
    stage.run.tracker.unlink()
    stage.signal_ranks(signal.SIGKILL, 0)


def revive_replaced_attempt(stage: FaultTarget) -> None:
    """Stop the first attempt inside its save, out of Slurm's reach; continue it beside its successor."""
    staged = stage.run.staging(1) / "iter_0000020"
    stage.wait(lambda: (staged / "metadata.json").exists())
    with stage.frozen():
        stage.signal_batch(signal.SIGKILL)
        stage.wait_iteration(15, attempt=2)


def fill_disk(stage: FaultTarget) -> None:
    """Fill the disk before the save of iteration 10; free the space before the end."""
    filler = stage.run.checkpoints / "filler"
    free = shutil.disk_usage(stage.run.checkpoints).free
    filler.write_bytes(b"\0" * max(0, free - 4096))
    stage.wait_iteration(25)
    filler.unlink()


def kill_node(stage: FaultTarget) -> None:
    """Kill the slurmd of a node after iteration 15, as a crash of the node does."""
    stage.wait_iteration(15)
    stage.kill_node()


def controller_down_at_submission(stage: FaultTarget) -> None:
    """Stop the controller for 60 s, from before the first successor is queued."""
    stage.stop_controller(60)


def controller_down_at_exit(stage: FaultTarget) -> None:
    """Ask the job to save and exit after iteration 15, and stop the controller for 60 s meanwhile."""
    stage.wait_iteration(15)
    job = stage.job_id()
    stage.order("scancel", "--signal=USR2", "--batch", job)
    stage.stop_controller(60)


def preempt(stage: FaultTarget) -> None:
    """Submit a job to a partition of higher priority that needs all nodes; return when the second attempt has begun."""
    stage.wait_iteration(15)
    stage.queue_job("--partition=high", "--nodes=4", "--exclusive", "--wrap=sleep 5", "--output=/dev/null")
    stage.wait(stage.run.attempt(2).begin.exists)


def ask_to_leave(stage: FaultTarget) -> None:
    """Ask the job to save and exit after iteration 15, as Slurm does before the time limit."""
    stage.wait_iteration(15)
    stage.order("scancel", "--signal=USR2", "--batch", stage.job_id())


def start_next_job_now(stage: FaultTarget) -> None:
    """Start the next job without its delay."""
    stage.hurry()


def hold_job_in_completing(stage: FaultTarget) -> None:
    """Keep the first job COMPLETING while its successor runs, and kill the successor's batch script."""
    with stage.slow_epilogs():
        ask_to_leave(stage)
        stage.wait_iteration(20, attempt=2)
        stage.must("COMPLETING" in stage.jobs().values(), "the first job does not stay COMPLETING")
        stage.signal_batch(signal.SIGKILL)


def read_only_between_jobs(stage: FaultTarget) -> None:
    """Make the run directory read-only when the second job begins, and writable for its second try."""
    stage.wait(stage.run.attempt(1).successor.exists)
    waiting = stage.waiting_job()
    stage.order("scontrol", "update", f"JobId={waiting}", "StartTime=now+600")
    ask_to_leave(stage)
    stage.wait(lambda: list(stage.jobs()) == [waiting])
    stage.remount("ro")
    stage.hurry()
    stage.wait(lambda: "begin-failed=1" in stage.ask("scontrol", "show", "job", waiting))
    stage.remount("rw")
    stage.hurry()


def lose_node_before_begin(stage: FaultTarget) -> None:
    """Lose the node of the batch script while `begin` runs, before anything is queued."""
    stage.wait(wrapper_marker(stage.commands).exists)
    stage.lose_node()


def kill_watch(stage: FaultTarget) -> None:
    """Kill the watch, and stop a rank."""
    stage.wait_iteration(15)
    stage.signal_watch(signal.SIGKILL)
    stop_rank(stage)


def disable_watch(stage: FaultTarget) -> None:
    """Put a directory where the watch writes the metrics, damage a heartbeat, and stop a rank."""
    stage.wait_iteration(15)
    first, view = stage.run.attempt(1), stage.run.metrics_view
    (first.heartbeats / "torn.json").write_text('{"node": ')
    aside = view.rename(view.with_name("metrics.aside"))
    view.mkdir()
    stop_rank(stage)
    stage.wait(first.hang.exists)
    view.rmdir()
    aside.rename(view)


def ask_to_exit(stage: FaultTarget) -> None:
    """Touch the exit trigger after iteration 15."""
    stage.wait_iteration(15)
    triggers.touch_trigger(stage.run, "exit")


def kill_begin(stage: FaultTarget) -> None:
    """Kill the batch script, and the next job's `begin` (by `Fault.commands`)."""
    kill_batch_script(stage)
    stage.wait(wrapper_marker(stage.commands).exists)
    stage.hurry()


def kill_batch_script_at_begin(stage: FaultTarget) -> None:
    """Ask the first job to exit; `Fault.commands` kills the next batch script, and another job follows."""
    ask_to_leave(stage)
    stage.wait(wrapper_marker(stage.commands).exists)
    killed = wrapper_marker(stage.commands).read_text().strip()
    stage.wait(lambda: [job for job in stage.waiting_jobs() if job != killed])
    stage.hurry()


def cancel_successor(stage: FaultTarget) -> None:
    """Cancel the waiting job, then ask the running job to exit."""
    stage.wait(stage.run.attempt(1).successor.exists)
    waiting = stage.waiting_job()
    stage.order("scancel", waiting)
    ask_to_leave(stage)


def hold_successor(stage: FaultTarget) -> None:
    """Hold the waiting job; release it when the attempt has failed and the job is still held."""
    stage.wait(stage.run.attempt(1).successor.exists)
    waiting = stage.waiting_job()
    stage.order("scontrol", "hold", waiting)
    stage.wait(stage.run.attempt(1).end.exists)
    stage.wait(lambda: list(stage.jobs()) == [waiting])
    stage.must("Reason=JobHeld" in stage.ask("scontrol", "show", "job", waiting), "the waiting job is not held")
    stage.order("scontrol", "release", waiting)
    stage.hurry()


def block_metrics_view(stage: FaultTarget) -> None:
    """Put a directory where the merged metrics are, ask the attempt to exit, and remove it in the next attempt."""
    stage.wait_iteration(15)
    view = stage.run.metrics_view
    aside = view.rename(view.with_name("metrics.aside"))
    view.mkdir()
    ask_to_leave(stage)
    stage.wait_iteration(20, attempt=2)
    view.rmdir()
    aside.rename(view)
