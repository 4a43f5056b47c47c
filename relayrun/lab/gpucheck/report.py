"""The result of a check as rows of a table, each with its target.

A `hard` target is one that relayrun promises: the check fails if it is missed, or if it was not measured although its
part was requested. Uses the standard library alone: the page of benchmarks is made of the same rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from relayrun.errors import RelayrunError
from relayrun.submit.check.findings import count_noun

RowVerdict = Literal["met", "missed", "not measured", ""]
"""`""`: without a target."""

MFU_TARGET, MFU_AIM = 0.50, 0.55
STALL_TARGET = 1.5
ROUNDING = 1e-4
"""Largest difference between logits in fp32, relative to the largest if that is above 1.

A GPU and the host add in different orders. A wrong weight makes a hundred times as much.
"""

LEARNED, NEAR = 0.95, 0.02
"""Limits on losses after a few iterations on one batch.

LEARNED: last loss as a share of the first. NEAR: distance to the loss of the same weights in fp32, as a share of it.
"""

FigureMap = Mapping[str, Any]


@dataclass(frozen=True)
class CheckRow:
    """A line of the table."""

    what: str
    value: str = ""
    target: str = ""
    verdict: RowVerdict = ""
    hard: bool = False
    part: str = ""

    @property
    def fails(self) -> bool:
        return self.hard and self.verdict in ("missed", "not measured")


def check_rows(result: FigureMap) -> list[CheckRow]:
    """Return the table of a result."""
    found: list[CheckRow] = []
    for part in result["parts"]:
        name, done = part["name"], part["status"] == "done"
        if not done:  # a skipped part fails only by its hard targets
            failed = part["status"] in ("failed", "timeout")
            value, verdict = f"{part['status']}: {part['words']}", _verdict(False if failed else None)
            found.append(CheckRow("the part", value, "done", verdict, hard=failed, part=name))
        made = _ROWS_BY_PART[name](part["figures"], result) if name in _ROWS_BY_PART else ()
        found += [replace(row, part=name) for row in made if done or row.value or row.hard]
    return found


def check_exit_code(table: list[CheckRow]) -> int:
    """Return 1 if a hard target is missed, or a part failed."""
    return int(any(row.fails for row in table))


def _verdict(met: bool | None) -> RowVerdict:
    return "not measured" if met is None else "met" if met else "missed"


def _promise(what: str, value: str, target: str, met: bool | None) -> CheckRow:
    """A row with a hard target; `met` is None if it was not measured."""
    return CheckRow(what, value, target, _verdict(met), hard=True)


def _equality(what: str, figures: FigureMap | None) -> CheckRow:
    """A row that promises equality; `figures` is None if it was not measured."""
    if figures is None:
        return _promise(what, "", "bit for bit", None)
    value = "bit for bit" if figures["equal"] else f"differs: {figures['difference']}"
    if before := figures.get("differed_before"):
        value += f" (and before the cut: {before})"
    return _promise(what, value, "bit for bit", figures["equal"])


def _environment(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    gpus = figures.get("gpus")
    if gpus:
        yield CheckRow("GPU", f"{len(gpus)} x {gpus[0]['name']}, {gpus[0]['memory_bytes'] / (1 << 30):.0f} GiB")
    elif gpus is not None:
        yield CheckRow("GPU", "none: CPUs, and the figures below say nothing of a GPU")
    for gpu in (figures.get("nvml") or [])[:1]:
        clocks = f"driver {gpu['driver']}, SM clock at most {gpu['sm_clock_max']} MHz, {gpu['power_limit']} W"
        yield CheckRow("NVML", clocks)
    if versions := figures.get("versions"):
        yield CheckRow("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if "product_tflops" in figures:
        value = f"{figures['product_tflops']:,.4g} TFLOP/s, {figures['copy_bytes_per_second'] / 1e9:,.4g} GB/s"
        yield CheckRow("a matrix product, a copy (read + written)", value)


def _resume(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    for cut in ("SIGUSR2", "SIGKILL", "asynchronous save"):
        yield _equality(f"resume after {cut}", figures.get("resumed", {}).get(cut))
    job, bits = figures.get("job"), figures.get("bits")
    failed = [] if job is None else job["restarts"]
    value = ""
    met: bool | None = None
    if job is not None:
        again = [each for each in failed if each["again"]]
        ranks = count_noun(job["ranks"], "rank")
        value = f"{count_noun(job['attempts'], 'attempt')} of {ranks}, {count_noun(len(again), 'new restart')}"
        met = job["attempts"] == 1 and len(failed) == len(again) == job["kills"]
        if not met and failed:  # further deaths
            value += f" ({'; '.join(dict.fromkeys(each['words'][:100] for each in failed))})"
    what = "a rank killed twice, training goes on inside its job"
    yield _promise(what, value, "1 attempt, a new restart for each", met)
    value, met = "", None
    if failed:
        sources, lost = [each["source"] for each in failed], [each["steps_lost"] for each in failed]
        value = f"{', '.join(sources)}; {', '.join(map(str, lost))} steps lost"
        met = set(sources) == {"memory"} and max(lost) <= 1
    yield _promise("where a restart has its state from", value, "memory, 1 step lost at most", met)
    yield _equality("losses, gradient norms, states and weights after that", bits)
    if seconds := [each["seconds"]["all"] for each in failed if "all" in each["seconds"]]:
        value = f"median {statistics.median(seconds):.3g} s, largest {max(seconds):.3g} s"
        yield CheckRow("from a rank's death to the next step", value)


def _speed(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    if "search" in figures:  # results recorded before 2026-11-28
        tries = [
            f"{one['micro_batch']} ({one['tokens_per_second']:,.0f} tokens/s)"
            if one["fits"]
            else f"{one['micro_batch']} (out of memory)"
            for one in figures["search"]["tries"]
        ]
        yield CheckRow("micro-batches tried", ", ".join(tries))
    training = figures.get("training")
    target = f"≥ {MFU_TARGET:.0%} (aim {MFU_AIM:.0%})"
    if training is None or training["mfu"] is None:
        value = "" if training is None else f"the peak of {result['device']} is not known"
        yield CheckRow("MFU", value, target, "not measured")
    else:
        size = f"{training['micro_batch_size']} x {training['seq_length']}"
        what = f"MFU, {training['precision']}, {size} tokens a micro-batch"
        yield CheckRow(what, f"{training['mfu']:.1%}", target, _verdict(training["mfu"] >= MFU_TARGET))
    if training is not None:
        value = f"{training['tokens_per_second_per_gpu']:,.0f}"
        yield CheckRow("tokens/s of a GPU" if result["gpus"] else "tokens/s", value)
    if memory := figures.get("memory"):
        what = "memory at its peak" if memory["device_bytes"] else "memory of the process (no GPU), and the estimate"
        value = f"{memory['peak_bytes'] / 1e9:,.4g} GB, estimated {memory['estimate_bytes'] / 1e9:,.4g} GB"
        yield CheckRow(what, value)
    if trace := figures.get("trace"):
        share = trace["busy_seconds"] / trace["seconds"] if trace["seconds"] else 0.0
        value = f"busy {share:.1%} of {trace['seconds']:.4g} s; the host waits {len(trace['waits'])} times"
        for longest in trace["longest"][:1]:
            value += f"; longest: {longest['name'][:60]}, {longest['seconds']:.4g} s"
        yield CheckRow(f"trace of an iteration ({trace['file']})", value)


def _save(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    target = f"≤ {STALL_TARGET:g} x the copy"
    saves, copy = figures.get("saves"), figures.get("copy")
    if saves is None or copy is None:
        yield _promise("what a save holds up", "", target, None)
    else:
        bare, first = copy["seconds_of_a_save"], saves["saves"][0]["stall_seconds"]
        later, durable = (
            statistics.median(one[name] for one in saves["saves"][1:])
            for name in ("stall_seconds", "durable_after_seconds")
        )
        size = f"{saves['bytes'] / 1e9:,.3g} GB"
        if saves["layers"] != saves["layers_of_the_model"]:
            size += f" ({saves['layers']} of {saves['layers_of_the_model']} layers, for the disk's sake)"
        met = max(0.0, later - result["stall_allowance"]) <= STALL_TARGET * bare
        if result["stall_allowance"]:
            target += f" + {result['stall_allowance']:g} s"
        value = f"{later:.3g} s, {later / bare:,.3g} x the copy ({bare:.3g} s)"
        yield _promise(f"what a save of {size} holds up", value, target, met)
        yield CheckRow("the first save of a process", f"{first:.3g} s, {first / bare:,.3g} x the copy")
        yield CheckRow("a save is durable", f"after {durable:.3g} s")
    if load := figures.get("load"):
        value = (
            f"{load['seconds']:.3g} s ({load['bytes_per_second'] / 1e9:,.3g} GB/s), after "
            f"{load['import_seconds']:.3g} s of imports and {load['set_up_seconds']:.3g} s of set-up"
        )
        yield CheckRow("a load", value)


def _kernels(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    for name, one in figures.get("kernels", {}).items():
        if "words" not in one:
            yield from _variants({name: one}, result)
        else:
            yield _promise(one["what"], one["words"], "runs", True)
    yield from _export(figures.get("export", {}), result)


def _variants(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    target = f"learns, {NEAR:.0%} of fp32's loss at most beside it"
    for name, one in figures.items():
        what = one.get("what", name)
        if "not_measured" in one:
            yield CheckRow(what, f"not measured: {one['not_measured']}")
            continue
        value, met = f"failed: {one.get('failed')}", False
        if "last_loss" in one:
            first, last, exact = one["first_loss"], one["last_loss"], one.get("exact_loss")
            met = last <= LEARNED * first and (exact is None or abs(last - exact) <= NEAR * exact)
            value = f"loss {first:.4g}, then {last:.4g}" + (f", {exact:.4g} in fp32" if exact is not None else "")
            value += f"; {one['tokens_per_second']:,.0f} tokens/s, {one['peak_bytes'] / 1e9:,.3g} GB"
        yield _promise(what, value, target, met)


def _export(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    value = ""
    met: bool | None = None
    if "difference" in figures:
        difference, largest = figures["difference"], figures["largest"]
        value = f"differ by {difference:.2g} at most (largest logit {largest:.3g}, {figures['tokens']} tokens)"
        met = difference <= ROUNDING * max(1.0, largest)
    yield _promise("logits of the export", value, "equal but for rounding", met)


_ROWS_BY_PART: dict[str, Callable[[FigureMap, FigureMap], Iterator[CheckRow]]] = {
    "environment": _environment,
    "resume": _resume,
    "speed": _speed,
    "save": _save,
    "kernels": _kernels,
    "layouts": _variants,
}


def result_file_name(device: str) -> str:
    """Return the name of the result file: `gpu-h200.json` for an "NVIDIA H200"."""
    words = "".join(char if char.isalnum() else " " for char in device.lower()).split()
    kept = [word for word in words if word not in ("nvidia", "amd", "tesla", "instinct")]
    if not kept:
        raise RelayrunError(f"the device {device!r} has no name to call a result by")
    return f"gpu-{'-'.join(kept)}.json"
