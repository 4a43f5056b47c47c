"""Whether a chain ended as the table says, and with the bits of the undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.stop import stop_reason
from relayrun.files import last_bytes, read_lines
from relayrun.lab.faults.fault import Fault
from relayrun.lab.faults.programs import wrapper_marker
from relayrun.lab.faults.small_run import RUN_STEPS
from relayrun.submit.run_plan import log_folder
from relayrun.train.checkpoint import checksums

LOG_BYTES_READ = 16 << 20
"""How much of the end of a job's log is looked at."""


@dataclass(frozen=True, kw_only=True)
class FaultVerdict:
    """What became of a run."""

    causes: list[str]
    """How its attempts ended, in order."""
    said: str
    """The reasons of these ends and of STOP, a line each."""
    wrong: list[str] = field(default_factory=list)
    """What is not as the table says, a sentence each; nothing: all is."""
    bit_for_bit: bool | None = None
    """Whether losses and checkpoint are those of the undisturbed run; None where the chain need not come so far."""


def judge_run(run: Run, fault: Fault, reference: Run, commands: Path) -> FaultVerdict:
    """Compare a run whose chain has ended with what the table says, and with the undisturbed run."""
    ends = _attempt_ends(run)
    reason = stop_reason(run)
    said = "\n".join([end.reason if end else "it left no end" for end in ends] + ([reason] if reason else []))
    causes = [end.cause if end else "none" for end in ends]
    wrong = []
    if len(causes) != len(fault.causes) or any(
        cause not in wanted.split("|") for cause, wanted in zip(causes, fault.causes, strict=True)
    ):
        wrong.append(f"attempts ended {', '.join(causes) or '(none)'}; expected {', '.join(fault.causes)}")
    stop = run.stop.read_text(encoding="utf-8") if run.stop.exists() else ""
    if fault.says not in f"{said}\n{stop}":
        wrong.append(f"nobody says {fault.says!r}")
    if fault.logged and not any(fault.logged in log_end(log) for log in job_logs(run)):
        wrong.append(f"no log of its jobs says {fault.logged!r}")
    if fault.commands and not wrapper_marker(commands).exists():
        wrong.append("the command that does harm was not called: the fault did not happen")
    same: bool | None = None
    if fault.expect == "resumed":
        differs = list(islice(run_differences(run, reference), 5))
        same = not differs
        wrong += differs
    elif not run.stop.exists():
        wrong.append("the chain ended without a STOP that says why")
    if any(entry.name.startswith("iter") for entry in (run.checkpoints / ".staging").rglob("*")):
        wrong.append("a checkpoint that was not published lies in checkpoints/.staging")
    return FaultVerdict(causes=causes, said=said, wrong=wrong, bit_for_bit=same)


def run_differences(run: Run, reference: Run) -> Iterator[str]:
    """What differs from the undisturbed run, a sentence each: losses, gradient norms, the last checkpoint."""
    steps, wanted = exact_steps(run), exact_steps(reference)
    if sorted(steps) != list(range(1, RUN_STEPS + 1)):
        yield f"it has {len(steps)} of {RUN_STEPS} steps"
    for iteration in sorted(steps.keys() & wanted.keys()):
        if steps[iteration] != wanted[iteration]:
            yield f"loss or gradient norm of iteration {iteration} are not those of the undisturbed run"
            break
    yield from checkpoint_differences(run.checkpoint(RUN_STEPS), reference.checkpoint(RUN_STEPS))


def checkpoint_differences(found: Path, wanted: Path) -> Iterator[str]:
    """What differs in two checkpoints that were saved with hashes: each is read back and compared with its own."""
    for folder in (found, wanted):
        _, faults = checksums.verify_checkpoint(folder, None)
        if faults:
            yield f"{folder}: {faults[0]}"
            return
    one, other = _checkpoint_hashes(found), _checkpoint_hashes(wanted)
    if one.keys() != other.keys():
        yield f"{found} has other tensors than {wanted}"
    for key in sorted(one.keys() & other.keys()):
        if one[key] != other[key]:
            yield f"{key[0]} in the checkpoint of iteration {RUN_STEPS} is not that of the undisturbed run"
            return


def _checkpoint_hashes(folder: Path) -> dict[tuple[str, str], str]:
    """Hashes of all values in a checkpoint: of tensors by name and place, of other files by their names."""
    sums = checksums.Checksums(folder, None)
    found = {(block.key, str(block.offset)): block.values or block.frame for block in sums.blocks()}
    for name, known in sums.files.items():
        if known.xxh3_128 is not None and not name.endswith(checksums.PIECE_SUFFIXES):
            found[name, ""] = known.xxh3_128
    return found


def exact_steps(run: Run) -> dict[int, tuple[str, ...]]:
    """Loss and gradient norm of every iteration in the merged view, as exact text; of one that stands twice, both."""
    found: dict[int, tuple[str, ...]] = {}
    for line in read_lines(run.metrics_view):
        if "loss" in line:
            found[line["iteration"]] = (*found.get(line["iteration"], ()), line["loss"].hex(), line["grad_norm"].hex())
    return found


def job_logs(run: Run) -> list[Path]:
    """What the jobs of the run wrote."""
    return sorted(log_folder(run).glob(f"{Plan.load(run).job_name}-*"))


def log_end(log: Path) -> str:
    """The end of a log."""
    return last_bytes(log, LOG_BYTES_READ).decode(errors="replace")


def _attempt_ends(run: Run) -> list[AttemptEnd | None]:
    numbers = [number for number in run.attempt_numbers() if run.attempt(number).begin.exists()]
    return [run.attempt(number).read_end() for number in numbers]
