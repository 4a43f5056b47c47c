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
STALL_TARGET = 2.0
ROUNDING = 1e-4
"""Largest difference between logits in fp32, relative to the largest if that is above 1.

A GPU and the host add in different orders. A wrong weight makes a hundred times as much.
"""

LEARNED, NEAR = 0.95, 0.02
"""Limits on losses after a few iterations on one batch.

LEARNED: last loss as a share of the first. NEAR: distance to the loss of the same weights in fp32, as a share of it.
"""

FigureMap = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """A line of the table."""

    what: str
    part: str = ""
    value: str = ""
    target: str = ""
    verdict: RowVerdict = ""
    hard: bool = False

    @property
    def fails(self) -> bool:
        return self.hard and self.verdict in ("missed", "not measured")


def check_rows(result: FigureMap) -> list[CheckRow]:
    """Return the table of a result."""
    found: list[CheckRow] = []
    for part in result["parts"]:
        name, figures = part["name"], part["figures"]
        if part["status"] != "done":
            value = f"{part['status']}: {part['words']}"
            # a skipped part fails only by its hard targets
            failed = part["status"] in ("failed", "timeout")
            verdict: RowVerdict = "missed" if failed else "not measured"
            found.append(CheckRow(part=name, what="the part", value=value, target="done", verdict=verdict, hard=failed))
        made = _ROWS_BY_PART[name](figures, result) if name in _ROWS_BY_PART else ()
        found += [replace(row, part=name) for row in made if part["status"] == "done" or row.value or row.hard]
    return found


def check_exit_code(table: list[CheckRow]) -> int:
    """Return 1 if a hard target is missed, or a part failed."""
    return int(any(row.fails for row in table))


def _environment(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    versions, gpus = figures.get("versions"), figures.get("gpus")
    if gpus:
        gib = gpus[0]["memory_bytes"] / (1 << 30)
        yield CheckRow(what="GPU", value=f"{len(gpus)} x {gpus[0]['name']}, {gib:.0f} GiB")
    elif gpus is not None:
        yield CheckRow(what="GPU", value="none: CPUs, and the figures below say nothing of a GPU")
    if figures.get("nvml"):
        gpu = figures["nvml"][0]
        clocks = f"driver {gpu['driver']}, SM clock at most {gpu['sm_clock_max']} MHz, {gpu['power_limit']} W"
        yield CheckRow(what="NVML", value=clocks)
    if versions:
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield CheckRow(what="versions", value=shown)
    if "product_tflops" in figures:
        value = f"{figures['product_tflops']:,.4g} TFLOP/s, {figures['copy_bytes_per_second'] / 1e9:,.4g} GB/s"
        yield CheckRow(what="a matrix product, a copy (read + written)", value=value)


def _resume(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    for mode, words in (("deterministic", "with training.deterministic"), ("default", "without")):
        promised = mode == "deterministic"
        about = figures.get(mode) or {}
        for cut in ("SIGUSR2", "SIGKILL", "asynchronous save"):
            one = about.get(cut)
            what = f"resume after {cut}, {words}"
            target = "bit for bit" if promised else ""
            if one is None:
                value = about.get("failed", "") if promised else ""
                verdict: RowVerdict = "not measured" if promised else ""
            else:
                value = "bit for bit" if one["equal"] else f"differs: {one['difference']}"
                if one["differed_before"]:
                    value += f" (and before the cut: {one['differed_before']})"
                verdict = ("met" if one["equal"] else "missed") if promised else ""
            yield CheckRow(what=what, value=value, target=target, verdict=verdict, hard=promised)


def _recovery(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    job, bits = figures.get("job"), figures.get("bits")
    one, state, equal = (
        "a rank killed twice, training goes on inside its job",
        "where a restart has its state from",
        "losses, gradient norms, states and weights after that",
    )
    targets = {one: "1 attempt, a new restart for each", state: "memory, 1 step lost at most", equal: "bit for bit"}
    values: dict[str, tuple[str, bool]] = {}
    failed = [] if job is None else job["restarts"]
    if job is not None:
        again = [each for each in failed if each["again"]]
        ranks = count_noun(job["ranks"], "rank")
        value = f"{count_noun(job['attempts'], 'attempt')} of {ranks}, {count_noun(len(again), 'new restart')}"
        met = job["attempts"] == 1 and len(failed) == len(again) == job["kills"]
        if not met and failed:  # further deaths
            value += f" ({'; '.join(dict.fromkeys(each['words'][:100] for each in failed))})"
        values[one] = value, met
    if failed:
        sources, lost = [each["source"] for each in failed], [each["steps_lost"] for each in failed]
        value = f"{', '.join(sources)}; {', '.join(map(str, lost))} steps lost"
        values[state] = value, set(sources) == {"memory"} and max(lost) <= 1
    if bits is not None:
        values[equal] = "bit for bit" if bits["equal"] else f"differs: {bits['difference']}", bits["equal"]
    for what, target in targets.items():
        value, met = values.get(what, ("", False))
        verdict: RowVerdict = "not measured" if what not in values else "met" if met else "missed"
        yield CheckRow(what=what, value=value, target=target, verdict=verdict, hard=True)
    if seconds := [each["seconds"]["all"] for each in failed if "all" in each["seconds"]]:
        value = f"median {statistics.median(seconds):.3g} s, largest {max(seconds):.3g} s"
        yield CheckRow(what="from a rank's death to the next step", value=value)


def _speed(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    if "search" in figures:
        tries = ", ".join(
            f"{one['micro_batch']} ({one['tokens_per_second']:,.0f} tokens/s)"
            if one["fits"]
            else f"{one['micro_batch']} (out of memory)"
            for one in figures["search"]["tries"]
        )
        yield CheckRow(what="micro-batches tried", value=tries)
    training = figures.get("training")
    target = f"≥ {MFU_TARGET:.0%} (aim {MFU_AIM:.0%})"
    if training is None or training["mfu"] is None:
        yield CheckRow(
            what="MFU",
            target=target,
            verdict="not measured",
            value="" if training is None else f"the peak of {result['device']} is not known",
        )
    else:
        verdict: RowVerdict = "met" if training["mfu"] >= MFU_TARGET else "missed"
        size = f"{training['micro_batch_size']} x {training['seq_length']}"
        what = f"MFU, {training['precision']}, {size} tokens a micro-batch"
        yield CheckRow(what=what, value=f"{training['mfu']:.1%}", target=target, verdict=verdict)
    if training is not None:
        value = f"{training['tokens_per_second_per_gpu']:,.0f}"
        yield CheckRow(what="tokens/s of a GPU" if result["gpus"] else "tokens/s", value=value)
    again = figures.get("deterministic")
    if again is not None and "not_measured" in again:
        value = f"not measured: {again['not_measured']}"
        yield CheckRow(what="time of an iteration with training.deterministic", value=value)
    elif training is not None and again is not None:
        more = again["step_seconds"] / training["step_seconds"] - 1
        value = f"{more:+.1%} ({again['tokens_per_second_per_gpu']:,.0f} tokens/s)"
        yield CheckRow(what="time of an iteration with training.deterministic", value=value)
    if "memory" in figures:
        memory = figures["memory"]
        value = f"{memory['peak_bytes'] / 1e9:,.4g} GB, estimated {memory['estimate_bytes'] / 1e9:,.4g} GB"
        what = "memory at its peak" if memory["device_bytes"] else "memory of the process (no GPU), and the estimate"
        yield CheckRow(what=what, value=value)
    if "by_part" in figures:
        whole = figures["by_part"]["total"]
        shares = ", ".join(
            f"{name.replace('_', ' ')} {seconds / whole:.1%}" for name, seconds in figures["by_part"]["seconds"].items()
        )
        yield CheckRow(what=f"parts of an iteration of {whole:.4g} s", value=shares)
    if "trace" in figures:
        trace = figures["trace"]
        share = trace["busy_seconds"] / trace["seconds"] if trace["seconds"] else 0.0
        value = f"busy {share:.1%} of {trace['seconds']:.4g} s"
        for longest in trace["longest"][:1]:
            value += f"; longest: {longest['name'][:60]}, {longest['seconds']:.4g} s"
        yield CheckRow(what=f"trace of an iteration ({trace['file']})", value=value)


def _save(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    target = f"≤ {STALL_TARGET:g} x the copy"
    saves, copy = figures.get("saves"), figures.get("copy")
    if saves is None or copy is None:
        yield CheckRow(what="what a save holds up", target=target, verdict="not measured", hard=True)
    else:
        bare = copy["seconds_of_a_save"]
        later = statistics.median(one["stall_seconds"] for one in saves["saves"][1:])
        first = saves["saves"][0]["stall_seconds"]
        size = f"{saves['bytes'] / 1e9:,.3g} GB"
        if saves["layers"] != saves["layers_of_the_model"]:
            size += f" ({saves['layers']} of {saves['layers_of_the_model']} layers, for the disk's sake)"
        held = max(0.0, later - result["stall_allowance"])
        verdict: RowVerdict = "met" if held <= STALL_TARGET * bare else "missed"
        if result["stall_allowance"]:
            target += f" + {result['stall_allowance']:g} s"
        value = f"{later:.3g} s, {later / bare:,.3g} x the copy ({bare:.3g} s)"
        yield CheckRow(what=f"what a save of {size} holds up", value=value, target=target, verdict=verdict, hard=True)
        yield CheckRow(what="the first save of a process", value=f"{first:.3g} s, {first / bare:,.3g} x the copy")
        lost = statistics.median(one["lost_seconds"] for one in saves["saves"][1:])
        durable = statistics.median(one["durable_after_seconds"] for one in saves["saves"][1:])
        value = f"{lost:.3g} s lost until it is durable, after {durable:.3g} s"
        yield CheckRow(what="with the iterations beside it", value=value)
    if "load" in figures:
        load = figures["load"]
        value = (
            f"{load['seconds']:.3g} s ({load['bytes_per_second'] / 1e9:,.3g} GB/s), after "
            f"{load['import_seconds']:.3g} s of imports and {load['set_up_seconds']:.3g} s of set-up"
        )
        yield CheckRow(what="a load", value=value)


def _attention(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    names = {
        "whole": "whole sequences",
        "packed": "packed documents",
        "packed_masked": "packed documents, with a mask",
        "window": "whole sequences, with a window",
    }
    for name, words in names.items():
        one = figures.get(name)
        if one is None:
            continue
        if "not_measured" in one:
            yield CheckRow(what=words, value=f"not measured: {one['not_measured']}")
            continue
        ran = (
            ", ".join(
                operation.removeprefix("aten::_").removeprefix("torch_attn::_")
                for operation in one["operations"]
                if "backward" not in operation
            )
            or "unknown"
        )
        kernel = f"; {one['kernels'][0]['name'][:50]}" if one["kernels"] else ""
        yield CheckRow(what=words, value=f"{one['tflops']:,.4g} TFLOP/s, {1000 * one['seconds']:.4g} ms: {ran}{kernel}")


def _variants(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    for name, one in figures.items():
        what = one.get("what", name)
        if "not_measured" in one:
            yield CheckRow(what=what, value=f"not measured: {one['not_measured']}")
            continue
        target = f"learns, {NEAR:.0%} of fp32's loss at most beside it"
        value = f"failed: {one.get('failed')}"
        verdict: RowVerdict = "missed"
        if "last_loss" in one:
            first, last, exact = one["first_loss"], one["last_loss"], one.get("exact_loss")
            met = last <= LEARNED * first
            value = f"loss {first:.4g}, then {last:.4g}"
            if exact is not None:
                value += f", {exact:.4g} in fp32"
                met = met and abs(last - exact) <= NEAR * exact
            value += f"; {one['tokens_per_second']:,.0f} tokens/s, {one['peak_bytes'] / 1e9:,.3g} GB"
            verdict = "met" if met else "missed"
        yield CheckRow(what=what, value=value, target=target, verdict=verdict, hard=True)


def _export(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    target = "equal but for rounding"
    if "difference" not in figures:
        yield CheckRow(what="logits of the export", target=target, verdict="not measured", hard=True)
        return
    value = (
        f"differ by {figures['difference']:.2g} at most "
        f"(largest logit {figures['largest']:.3g}, {figures['tokens']} tokens)"
    )
    met = figures["difference"] <= ROUNDING * max(1.0, figures["largest"])
    verdict: RowVerdict = "met" if met else "missed"
    yield CheckRow(what="logits of the export", value=value, target=target, verdict=verdict, hard=True)


def _bandwidth(figures: FigureMap, result: FigureMap) -> Iterator[CheckRow]:
    for name, words in (("machine", "all-reduce in this machine"), ("nodes", "all-reduce over all nodes")):
        one = figures.get(name)
        if one is None:
            continue
        if "not_measured" in one:
            yield CheckRow(what=words, value=f"not measured: {one['not_measured']}")
            continue
        speeds = ", ".join(
            f"{entry['bus_bytes_per_second'] / 1e9:,.3g} GB/s at {entry['bytes'] / (1 << 20):,.3g} MiB"
            for entry in one["all_reduce"]
        )
        yield CheckRow(what=f"{words}, {one['ranks']} ranks, {one['backend']}, bus bandwidth", value=speeds)


_ROWS_BY_PART: dict[str, Callable[[FigureMap, FigureMap], Iterator[CheckRow]]] = {
    "environment": _environment,
    "resume": _resume,
    "recovery": _recovery,
    "speed": _speed,
    "save": _save,
    "attention": _attention,
    "models": _variants,
    "layouts": _variants,
    "export": _export,
    "bandwidth": _bandwidth,
}


def result_file_name(device: str) -> str:
    """Return the name of the result file: `gpu-h200.json` for an "NVIDIA H200"."""
    words = "".join(char if char.isalnum() else " " for char in device.lower()).split()
    kept = [word for word in words if word not in ("nvidia", "amd", "tesla", "instinct")]
    if not kept:
        raise RelayrunError(f"the device {device!r} has no name to call a result by")
    return f"gpu-{'-'.join(kept)}.json"
