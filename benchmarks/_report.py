#!/usr/bin/env python3
"""docs/reference/benchmarks.md, from the results: what was measured against whom, its spread, and what is wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from relayrun.lab.gpucheck import report

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    what: str
    place: str
    """Keys below the figures of a result, with dots; there is a number, an object with min, median and max, or a list,
    which counts."""
    form: str
    least: float | None = None
    most: float | None = None
    optional: bool = False
    """A result that lacks it, because it is older or left that run out, goes without this row."""

    def lines(self, figures: Any) -> list[str]:
        try:
            value = reduce(
                lambda found, key: found[int(key) if isinstance(found, list) else key], self.place.split("."), figures
            )
        except KeyError:
            if self.optional:
                return []
            raise
        value = len(value) if isinstance(value, list) else value
        value = value if isinstance(value, dict) else dict.fromkeys(("median", "min", "max"), value)
        text = f"{value['median']:{self.form}}"
        if value["min"] != value["max"]:
            text += f" ({value['min']:{self.form}} to {value['max']:{self.form}})"
        wanted, reached = "", ""
        if self.least is not None:
            wanted, reached = f"≥ {self.least:{self.form}}", _reached(value, lambda one: one >= self.least)
        if self.most is not None:
            wanted, reached = f"≤ {self.most:{self.form}}", _reached(value, lambda one: one <= self.most)
        return [f"| {self.what} | {text} | {wanted} | {reached} |"]


def _reached(spread: dict[str, float], on_its_side: Callable[[float], bool]) -> str:
    """Whether the whole spread is on the side of the target that is wanted."""
    sides = {on_its_side(spread[end]) for end in ("min", "max")}
    return "undecided" if len(sides) == 2 else "yes" if True in sides else "no"


FAMILIES = {
    **dict.fromkeys(("Llama 3", "GPT-2", "o200k"), 15),
    **dict.fromkeys(("Qwen", "DeepSeek", "Tekken", "StarCoder"), 12),
    "Llama 2": 6,
}
"""How many times less CPU time than datatrove's is wanted, by tokenizer."""

SECTIONS: dict[str, list[Row]] = {
    "tokenization": [
        Row(
            "CPU time of datatrove's reader and Megatron writer over ours, same bytes",
            "cpu_speed_up_over_datatrove",
            ".1f",
            least=10,
        ),
        Row("million tokens per CPU second, with all that a start costs", "mtok_per_cpu_second", ".1f"),
        Row("the same on a longer text", "mtok_per_cpu_second_long", ".1f"),
        Row(
            "CPU time of a bare loop of the same engine, which throws its ids away, over ours",
            "share_of_the_bare_loop",
            ".2f",
            least=0.85,
        ),
        Row("the same on eight times the text", "share_of_the_bare_loop_long", ".2f"),
        Row(
            "the same on eight times the text, with ids that the bare loop writes",
            "share_of_the_bare_loop_long_that_writes",
            ".2f",
        ),
        Row("speed of two workers over that of one", "one_to_two_workers", ".2f", least=1.8),
        Row("MB of the largest process", "largest_process_mb.relayrun", ".0f", most=600),
        Row(
            "MB of the largest process, a parquet document of 60 MB",
            "largest_process_mb_document_of_60_mb.parquet",
            ".0f",
            most=600,
        ),
        Row(
            "MB of the largest process, a jsonl document of 60 MB",
            "largest_process_mb_document_of_60_mb.jsonl",
            ".0f",
            most=600,
        ),
        Row(
            "MB of the largest process, a jsonl document of 1 GB",
            "largest_process_mb_document_of_1_gb",
            ".0f",
            most=600,
        ),
    ],
    "tokenizer_families": [
        *(
            Row(
                f"CPU time of datatrove's reader and Megatron writer over ours, {which}: {name}",
                f"{name}.{figure}",
                ".1f",
                least,
            )
            for name, least in FAMILIES.items()
            for which, figure in (
                ("on a machine that has met the tokenizer", "cpu_speed_up"),
                ("with the proof of a first start", "cpu_speed_up_first"),
            )
        ),
        *(
            Row(
                f"CPU time of datatrove's reader and Megatron writer over the bare loop of the engine: {name}",
                f"{name}.cpu_speed_up_of_bare_loop",
                ".1f",
                optional=True,
            )
            for name in ("Llama 3", "GPT-2", "o200k", "Tekken")
        ),
        *(
            Row(
                f"CPU seconds until the first document, on a machine that has met the tokenizer: {name}",
                f"{name}.start_again_cpu_s",
                ".2f",
                most=1.5,
            )
            for name in FAMILIES
        ),
        Row("the same, on one that has not: Llama 3", "Llama 3.start_cpu_s", ".2f"),
        Row("the same, on one that has not: o200k", "o200k.start_cpu_s", ".2f"),
    ],
    "shards": [
        Row("CPU time of reading shards over that of `verify_dataset.py`", "verify_share_of_reading", ".2f", least=0.5),
        Row("CPU time of `cat` and sync over that of `merge_datasets.py`", "merge_share_of_cat", ".2f", least=0.8),
        Row(
            "CPU time of DuckDB with one thread over that of `reshard.py`", "reshard_share_of_duckdb", ".2f", least=0.5
        ),
        Row(
            "memory of `reshard.py` over `--memory-limit`, data eight times that, one thread",
            "reshard_memory.runs.0.peak_over_memory_limit",
            ".2f",
            most=1.1,
        ),
        Row("the same with four threads", "reshard_memory.runs.1.peak_over_memory_limit", ".2f", most=1.1),
    ],
    "checkpoint": [
        Row(
            "time that a save beside training loses, over that of one that stands still",
            "lost_async_over_sync",
            ".2f",
            most=0.15,
        ),
        Row("seconds lost beside training", "lost_seconds_async", ".2f"),
        Row("seconds lost standing still", "lost_seconds_sync", ".2f"),
        Row("seconds of a copy in memory of as many bytes", "memcpy_seconds", ".2f"),
    ],
    "documents": [
        *(
            Row(
                f"CPU time of one mask over ours, a row of 8,192 tokens as {count} document{'s' * (count > 1)}",
                f"documents.{count}.masked_over_ours",
                ".1f",
                least=8 if count == 64 else None,
            )
            for count in (1, 4, 16, 64)
        ),
        *(
            Row(f"CPU seconds of a layer, {count} document{'s' * (count > 1)}", f"documents.{count}.cpu_seconds", ".3f")
            for count in (1, 4, 16, 64)
        ),
        Row(
            "memory of a row of 32,768 tokens in 64 documents, over that of one document",
            "memory_over_one_document",
            ".2f",
            most=1.2,
        ),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "streams": [
        Row(
            "million tokens per CPU second, with a process beside the rank",
            "million_tokens_per_cpu_second.relayrun_worker",
            ".1f",
        ),
        Row("the same, read in process", "million_tokens_per_cpu_second.relayrun", ".1f"),
        Row(
            "tokens per CPU second over those of Grain's rows, the same engine called for each document",
            "ratio.relayrun_worker.grain_same_engine",
            ".1f",
            least=5,
        ),
        Row("the same of a stream read in process", "ratio.relayrun.grain_same_engine", ".1f"),
        Row(
            "over those of Grain's documents, which are not put into rows",
            "ratio.relayrun_worker.grain_same_engine_documents",
            ".1f",
        ),
        Row("over Grain's rows with its usual tokenizer", "ratio.relayrun_worker.grain_usual", ".1f", least=10),
        Row("over Grain with the engine in a batched map, documents", "ratio.relayrun_worker.grain_batches", ".1f"),
        Row("over a bare loop of batches with the engine", "ratio.relayrun_worker.loop_engine_batches", ".2f"),
        Row("over a bare loop of rows with the usual tokenizer", "ratio.relayrun_worker.loop_usual_rows", ".1f"),
        Row("seconds to the first sample of 1,000 files", "first_sample.window.seconds", ".1f", most=2),
        Row(
            "the same with a shuffle over all fragments, which reads all metadata",
            "first_sample.all.seconds",
            ".1f",
            most=10,
        ),
        Row("memory at the end over that after a fifth of the time", "memory.last_over_first", ".2f", most=1.05),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "loader": [
        Row("million tokens per CPU second of the loader", "relayrun.million_tokens_per_cpu_second", ".1f"),
        Row("the same without threads of its own", "relayrun_alone.million_tokens_per_cpu_second", ".1f"),
        Row("that over a loop that reads, encodes and cuts", "ratio.bare.million_tokens_per_cpu_second", ".2f"),
        *(
            row
            for way, name in (
                ("torchdata", "StatefulDataLoader over a stream of Hugging Face datasets"),
                ("grain", "Grain"),
            )
            for row in (
                Row(
                    f"tokens per CPU second over {name}", f"ratio.{way}.million_tokens_per_cpu_second", ".2f", least=1.5
                ),
                Row("memory over it", f"ratio.{way}.peak_gigabytes", ".2f", most=1),
                Row("CPU seconds to the first batch over it", f"ratio.{way}.first_batch_cpu_seconds", ".2f"),
                Row("CPU seconds to the first batch of a resume over it", f"ratio.{way}.resume_cpu_seconds", ".2f"),
            )
        ),
        Row(
            "CPU seconds from the start of Python to the first batch",
            "relayrun.first_batch_cpu_seconds",
            ".2f",
            most=0.8,
        ),
        Row("the same behind a state", "relayrun.resume_cpu_seconds", ".2f"),
        Row(
            "CPU seconds of a resume in a process that has read",
            "relayrun.resume_in_process_cpu_seconds",
            ".2f",
            most=0.15,
            optional=True,
        ),
        *(
            Row(f"{what} {name}", f"ratio.{way}.{figure}", ".2f", optional=True, **wanted)
            for way, name, least in (
                ("gptdataset", "megatron-core's GPTDataset, the same token shards", {"least": 2.6}),
                ("mosaicml", "MosaicML's StreamingDataset of the same tokens", {}),
            )
            for what, figure, wanted in (
                ("tokens per CPU second over", "million_tokens_per_cpu_second", least),
                ("memory over", "peak_gigabytes", {"most": 1}),
                ("CPU seconds to the first batch over", "first_batch_cpu_seconds", {}),
            )
        ),
        Row("gigabytes at most", "relayrun.peak_gigabytes", ".2f"),
        Row("the same, rows shuffled among all", "relayrun_default.peak_gigabytes", ".2f", optional=True),
        Row(
            "million tokens per CPU second, rows shuffled among all",
            "relayrun_default.million_tokens_per_cpu_second",
            ".1f",
            optional=True,
        ),
        Row("bytes of the state", "relayrun.state_bytes", ",.0f", most=16_384),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "sorted_files": [
        Row("lag-1 correlation of lengths in files that are sorted", "lag_1_correlation", ".2f"),
        Row("change of the loss from step to step, sorted files over shuffled ones", "loss_noise_ratio", ".1f"),
        Row("largest rise of the loss in a step, nats, sorted", "runs.sorted.largest_rise", ".2f"),
        Row("the same, shuffled", "runs.shuffled.largest_rise", ".2f"),
        Row("CPU time of the longest step over the median, sorted", "runs.sorted.longest_step", ".1f"),
        Row("the same, shuffled", "runs.shuffled.longest_step", ".1f"),
        Row("loss on held-out sequences at the end, sorted", "runs.sorted.held_out_loss", ".3f"),
        Row("the same, shuffled", "runs.shuffled.held_out_loss", ".3f"),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "checksums": [
        Row("CPU time that checksums add to that of a save", "hashing_over_save", ".3f", most=0.05),
        Row("of it, in the copy, where the values are hashed", "hashing_in_the_copy_over_save", ".3f"),
        Row("CPU seconds of a save of 1.1 GB, with them", "save_cpu_seconds", ".2f"),
        Row("the same without", "save_cpu_seconds_without_hashes", ".2f"),
        Row("CPU seconds of the copy, with them", "copy_cpu_seconds", ".2f"),
        Row("the same without, in one piece", "copy_cpu_seconds_without_hashes", ".2f"),
        Row("CPU seconds to hash as many bytes in the cache: no place is cheaper", "hash_in_cache_cpu_seconds", ".3f"),
        Row("the same from memory", "hash_from_memory_cpu_seconds", ".3f"),
        Row("load of the machine meanwhile; on a busy one hashes cost more", "load_average", ".1f"),
    ],
    "training": [
        Row("CPU time of our loop over that of the same model stepped bare", "cpu.ratio", ".3f", most=1.02),
    ],
    "relay": [
        Row("seconds from the signal to the first new step of the next job", "total", ".1f"),
        Row("the launcher's own part of it", "own_share", ".3f", most=0.1),
    ],
    "kills": [
        Row("turns of all these runs, of which the figures are medians", "turns", ".0f"),
        Row(
            "effective training time, with as many spare nodes as were lost: seconds undisturbed over its own seconds",
            "spares.effective_training_time",
            ".3f",
            least=0.9,
        ),
        Row("seconds from its first step to its last", "spares.seconds", ".0f"),
        Row("the same, undisturbed, with agents and copies", "undisturbed.seconds", ".0f"),
        Row("the same, undisturbed, without agents and copies", "bare.seconds", ".0f", optional=True),
        Row(
            "seconds with agents and copies over seconds without, undisturbed",
            "undisturbed.over_bare",
            ".3f",
            optional=True,
        ),
        Row("part of its own time in which steps were done that count", "spares.counted_share", ".3f"),
        Row("seconds between two kills of a random rank", "kill_every_seconds", ".0f"),
        Row("seconds between two losses of a random node", "lose_every_seconds", ".0f"),
        Row("ranks killed", "spares.kills", ".0f"),
        Row("nodes lost", "spares.nodes_lost", ".0f"),
        Row("jobs", "spares.jobs", ".0f", most=1),
        Row("steps", "spares.steps", ".0f"),
        Row("steps done again", "spares.steps_lost", ".0f"),
        Row("median seconds of a step", "spares.step_seconds", ".4f"),
        Row("the same, undisturbed, with agents and copies", "undisturbed.step_seconds", ".4f"),
        Row("the same, undisturbed, without agents and copies", "bare.step_seconds", ".4f", optional=True),
        Row("seconds from a failure to the next step, median", "spares.restart_seconds.all.median", ".1f"),
        Row("the same, 95th percentile", "spares.restart_seconds.all.p95", ".1f"),
        Row("tensors of the last checkpoint compared with the undisturbed run's", "spares.tensors_compared", ".0f"),
        Row("claims that do not hold", "does_not_hold", ".0f", most=0),
        Row("effective training time with one spare node", "one_spare.effective_training_time", ".3f", optional=True),
        Row("seconds there", "one_spare.seconds", ".0f", optional=True),
        Row("seconds of as many steps undisturbed", "one_spare.undisturbed_seconds", ".0f", optional=True),
        Row(
            "of these, computed from the mean of the whole undisturbed run",
            "one_spare.undisturbed_seconds_by_mean",
            ".0f",
            optional=True,
        ),
        Row("nodes lost there", "one_spare.nodes_lost", ".0f", optional=True),
        Row("jobs there", "one_spare.jobs", ".0f", optional=True),
        Row("load of the machine meanwhile, beside other work: seconds are upper bounds", "load_average", ".0f"),
    ],
    "kills_cost": [
        Row("turns of three runs that take turns in both orders", "turns", ".0f"),
        Row("seconds without agents and copies", "bare.seconds", ".0f"),
        Row("seconds with agents and copies", "undisturbed.seconds", ".0f"),
        Row("the second over the first", "undisturbed.over_bare", ".3f"),
        Row("median seconds of a step without them", "bare.step_seconds", ".4f"),
        Row("median seconds of a step with them", "undisturbed.step_seconds", ".4f"),
        Row("effective training time with a kill every minute", "spares.effective_training_time", ".3f"),
        Row("load of the machine meanwhile, of which the ranks are the most", "load_average", ".0f"),
    ],
    "kills_often": [
        Row("ranks", "ranks", ".0f"),
        Row("seconds between two kills of a random rank", "kill_every_seconds", ".0f"),
        Row("ranks killed", "spares.kills", ".0f"),
        Row("seconds from a failure to the next step of all ranks, median", "spares.restart_seconds.all.median", ".2f"),
        Row("the same, 95th percentile", "spares.restart_seconds.all.p95", ".2f", most=1.5),
        Row("the same, longest", "spares.restart_seconds.all.max", ".2f"),
        Row("of it process groups and model, median", "spares.restart_seconds.groups.median", ".2f"),
        Row("most steps that a restart lost", "spares.most_steps_lost_in_a_restart", ".0f"),
        Row("jobs", "spares.jobs", ".0f", most=1),
        Row("tensors of the last checkpoint compared with the undisturbed run's", "spares.tensors_compared", ".0f"),
        Row("claims that do not hold", "does_not_hold", ".0f", most=0),
        Row("load of the machine meanwhile, of which the ranks are the most", "load_average", ".1f"),
    ],
    "coordinator": [
        Row("nodes, with a stand-in of an agent each, beside spare ones", "nodes", ",.0f"),
        Row("ranks, none of which computes", "ranks", ",.0f"),
        Row("CPU seconds from the first connection to the order to start", "start.cpu_seconds", ".2f"),
        Row("CPU seconds of a second of heartbeats", "idle.cpu_seconds_per_second", ".3f", most=0.1),
        Row("bytes of a second of heartbeats, both directions", "idle.bytes_per_second", ",.0f", most=1_000_000),
        Row("the same where all ranks make no progress for 31 s", "long_steps.bytes_per_second", ",.0f"),
        *(
            Row(f"{what}: {told}", f"{phase}.{figure}", form)
            for phase, what in (
                ("death_of_a_rank", "death of a rank"),
                ("loss_of_a_node", "loss of a node, with a spare one"),
                ("hang", "hang, with two seconds for stacks"),
            )
            for told, figure, form in (
                ("CPU seconds until the order to start again", "cpu_seconds", ".2f"),
                ("seconds until the first order to end", "seconds_to_the_first_order_to_end", ".3f"),
                ("seconds until every agent has the order to start", "seconds_to_the_last_order_to_start", ".1f"),
            )
        ),
        Row("CPU seconds of the end", "stop.cpu_seconds", ".2f"),
        Row("MB of the process", "memory_mb", ".0f", most=500),
        Row("load of the machine, whose processors the stand-ins use, too", "load_average", ".1f"),
    ],
    "plans": [
        Row("writers of a save, one after the other in one process", "largest.writers", ",.0f"),
        Row("tensors, each divided by all writers", "tensors", ".0f"),
        Row("CPU seconds of a writer for its plan", "largest.a_rank", ".4f"),
        Row("bytes of its message", "largest.bytes_of_a_message", ",.0f"),
        *(
            row
            for what, figure in (
                ("read the messages", "unpack"),
                ("join the plans, with the metadata", "join"),
                ("make the answers", "answers"),
            )
            for row in (
                Row(f"CPU seconds of rank 0 to {what}", f"largest.{figure}", ".2f"),
                Row("exponent by which they grow from half as many writers", f"growth.{figure}", ".2f", most=1.3),
            )
        ),
        Row("CPU seconds of a rank to read the metadata at a load", "largest.load_metadata", ".2f"),
        Row("exponent by which they grow from half as many writers", "growth.load_metadata", ".2f", most=1.3),
        Row("CPU seconds of a rank to plan its reads", "largest.load_plan", ".3f"),
        Row("CPU seconds of a rank to divide the blocks of twice as many ranks", "largest.load_division", ".3f"),
    ],
    "large_save": [
        Row("bytes of the checkpoint, of one rank on a machine without a GPU", "checkpoint_bytes", ",.0f"),
        Row("seconds for which training stands still", "stands_still_seconds", ".2f"),
        Row("seconds until it is committed, beside training", "commit_seconds", ".1f"),
        Row("bytes a second until then", "commit_bytes_per_second", ",.0f"),
        Row(
            "seconds of a save for which training stands still until it is committed",
            "commit_without_copy_seconds",
            ".1f",
        ),
        Row("bytes a second that two plain files, synced, are written with", "disk_bytes_per_second", ",.0f"),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "control_plane": [
        Row("runs", "runs", ",.0f"),
        Row("attempts", "attempts", ",.0f"),
        Row("runs that have not ended; as many ended within a month, the others before", "living", ",.0f"),
        Row("CPU seconds of `relayrun status`", "status.again", ".2f", most=1),
        Row("the same with `--all`", "status_all.again", ".2f", most=1),
        Row("the same with `--all` the first time, when no rows of stopped runs are kept", "status_all.first", ".2f"),
        Row("CPU seconds of a look of the sentinel", "sentinel.again", ".2f", most=1),
        Row("CPU seconds of `relayrun metrics`, with the accounts of its runs", "metrics.again", ".2f", most=1),
        Row("the same the first time, when no sums of ended attempts are kept", "metrics.first", ".2f"),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "many_nodes": [
        Row("nodes of the large cluster, all on one machine", "nodes", ",.0f"),
        *(
            Row(f"CPU seconds of {what}, {told}", f"{cluster}.{verb}", ".2f")
            for verb, what in (
                ("begin", "`begin`"),
                ("begin_with_a_bad_node", "`begin` that leaves out a node"),
                ("end", "`end`"),
                ("end_with_a_bad_node", "`end` that leaves out a node"),
                ("check", "`relayrun check`"),
                ("status", "`relayrun status RUN`"),
                ("sentinel", "a look of the sentinel"),
            )
            for told, cluster in (
                ("a job of 4 nodes of 4", "few_nodes_few_in_the_job"),
                ("a job of 4 of the large cluster", "many_nodes_few_in_the_job"),
                ("a job of all", "many_nodes_many_in_the_job"),
            )
        ),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "simulator": [
        *(
            Row(f"{told}, {what}", f"reproduced.{name}.{figure}", form, most=most)
            for name, what in (("kills", "`kills`"), ("kills_often", "`kills_often`"))
            for told, figure, form, most in (
                ("share of the time in steps that count, measured", "measured", ".3f", None),
                ("the same, simulated", "simulated", ".3f", None),
                ("difference", "difference", ".3f", 0.03),
            )
        ),
        Row("published at least: effective training time of Llama 3", "published.llama_3.effective_at_least", ".3f"),
        Row("simulated with assumed costs of its restarts", "llama_3.effective", ".3f"),
        Row("minutes that a failure may have cost at most", "allowed_minutes.llama_3", ".1f"),
        Row("published: effective training time of ByteRobust", "published.byterobust.effective", ".3f"),
        Row(
            "simulated with assumed costs of its restarts, at Llama 3's failures per GPU", "byterobust.effective", ".3f"
        ),
        Row("minutes that a failure may have cost at most", "allowed_minutes.byterobust", ".1f"),
        Row(
            "**simulated**: ours on 16,384 GPUs at Llama 3's rate of failures",
            "ours_16384.effective",
            ".3f",
            least=0.97,
        ),
        Row("failures there", "ours_16384.failures", ".0f"),
        Row("jobs there", "ours_16384.jobs", ".0f"),
        *(
            Row(f"share of the time there: {part}", f"ours_16384.share_of_the_time.{part}", ".4f")
            for part in ("restart", "redone", "saves and copies", "next job")
        ),
        Row("**simulated**: ours on 9,600 GPUs", "ours_9600.effective", ".3f"),
        Row("draws of each, with their own failures and values from the ranges", "ours_16384.draws", ".0f"),
    ],
    "recovery": [
        *(
            Row(f"{what}: {told}", f"{side}.{figure}", form)
            for side, told in (
                ("native_memory", "our restarts, copies in memory"),
                ("native_disk", "our restarts, from the disk"),
                ("command", "our restarts, a program started anew"),
                ("ft_launcher", "the launcher of nvidia-resiliency-ext"),
                ("torchrun", "torchrun"),
                ("in_process", "nvidia-resiliency-ext in the process, without the dead rank"),
            )
            for what, figure, form in (
                ("seconds from SIGKILL to the next step of all ranks", "seconds", ".1f"),
                ("95th percentile", "p95", ".1f"),
                ("steps done again", "steps_lost", ".0f"),
                ("losses equal those of an undisturbed run (1: yes)", "equal", ".0f"),
            )
        ),
        Row("load of the machine meanwhile: seconds are upper bounds on a busy one", "load_average", ".1f"),
    ],
    "round_cost": [
        Row("% of a step that heartbeats cost with node agents (median, quartiles)", "heartbeats", ".2f"),
        Row("the same in microseconds of a step, which do not grow with the model", "heartbeats_microseconds", ".0f"),
        Row("% of a step that the comparison of ranks costs (median, quartiles)", "stragglers", ".2f"),
        Row("the same in microseconds: 1000 are 0.1% of a second", "stragglers_microseconds", ".0f", most=1000),
        Row("% of a step that copies in memory cost, as often as the run chooses", "memory_chosen", ".1f", most=2),
        Row("steps between two of them", "chosen_interval", ".0f"),
        Row("% of a step that a copy after each step costs", "memory", ".1f"),
        Row("load of the machine meanwhile", "load_average", ".1f"),
    ],
    "check": [
        Row("CPU seconds of `relayrun check` of a run with 4 shards", "demo.cpu", ".2f", most=1),
        Row("the same of 1,000 shards", "large.cpu", ".2f"),
        Row("seconds of `relayrun check` of a run with 1,000 shards", "large.wall", ".1f", most=5),
    ],
    "status": [
        Row("CPU seconds of `relayrun status` over 1,000 runs, one of 10⁶ iterations", "status.median", ".2f", most=1),
        Row("the same until the first lines of `status -f`", "status_follow.median", ".2f", most=1),
        Row("of `relayrun status` of the long run alone", "status_long_run.median", ".2f", most=1),
    ],
    "history": [
        Row(
            "CPU seconds of `begin` after 10⁶ metrics lines and 200 attempts",
            "largest.begin.cpu_seconds",
            ".2f",
            most=1,
        ),
        Row("before the past was read from its end", "largest.before.begin.cpu_seconds", ".1f"),
        Row("CPU seconds of `end` there", "largest.end.cpu_seconds", ".2f", most=1),
        Row("before", "largest.before.end.cpu_seconds", ".1f"),
        Row("MB of `begin` there", "largest.begin.peak_mb", ".0f", most=150),
        Row("before", "largest.before.begin.peak_mb", ".0f"),
        Row("MB of `end` there", "largest.end.peak_mb", ".0f", most=150),
        Row("before", "largest.before.end.peak_mb", ".0f"),
        Row("files that `begin` opens there", "largest.begin.opened", ".0f"),
        Row("of these a second time", "largest.begin.opened_again", ".0f", most=5),
        Row("before", "largest.before.begin.opened", ".0f"),
        Row("files that `end` opens there", "largest.end.opened", ".0f"),
        Row("of these a second time", "largest.end.opened_again", ".0f", most=5),
        Row("before", "largest.before.end.opened", ".0f"),
    ],
    "curation": [
        Row("MB of text", "text_mb", ".0f"),
        Row(
            "CPU time of datatrove's executor with FineWeb's filters and tokenization over ours",
            "whole_over_datatrove",
            ".2f",
        ),
        Row("the same of tokenization alone", "tokenization_over_datatrove", ".1f"),
        Row("the same of the filters: the difference", "filters_over_datatrove", ".2f", least=1),
        Row("the filters' share of datatrove's time", "filters_share_of_datatrove", ".2f"),
        Row(
            "the first as a share of what it is where filters are as fast as theirs",
            "share_of_the_bound",
            ".2f",
            least=0.9,
        ),
        Row("CPU time of datatrove's MinHash over ours, same documents", "minhash_over_datatrove", ".2f", least=1),
        Row("memory of all processes of it, over datatrove's", "minhash_memory_of_datatroves", ".2f", most=1),
    ],
    "step_price": [
        Row("MB of text in parquet", "text_mb", ".0f"),
        Row("CPU seconds of a dump without `pipeline`", "cpu_s.none", ".1f"),
        Row("the same with one step that passes every document, same bytes", "cpu_s.step", ".1f"),
        Row("its price, where the start of Python and datatrove is left out: CPU ms per MB", "ms_per_mb", ".1f"),
        Row("the same per document, in microseconds", "us_per_document", ".0f"),
        Row("CPU seconds of the start without `pipeline`, one worker", "start_cpu_s.none", ".1f"),
        Row("the same with the step", "start_cpu_s.step", ".1f"),
    ],
    "curation_slurm": [
        Row("MB of text", "text_mb", ".0f"),
        Row(
            "CPU time of the jobs of datatrove's Slurm executor with FineWeb's filters and tokenization over ours",
            "filters_over_datatrove",
            ".2f",
            least=1,
        ),
        Row("the same of MinHash, same documents", "minhash_over_datatrove", ".2f", least=1),
        *(
            Row(f"CPU seconds of the commands that submit, {work}, {side}", f"commands_cpu_s.{work}.{side}", ".1f")
            for work in ("filters", "minhash")
            for side in ("datatrove", "relayrun")
        ),
        *(
            Row(f"seconds from submission to end, {work}, {side}", f"seconds_to_the_end.{work}.{side}", ".0f")
            for work in ("filters", "minhash")
            for side in ("datatrove", "relayrun")
        ),
    ],
    "curation_slurm_faults": [
        *(
            Row(f"{words}, {side}", f"{fault}.{side}.{place}", ".0f")
            for words, fault, place in (
                ("commands after a lost node", "node_lost", "commands_again"),
                ("the same of MinHash", "node_lost_minhash", "commands_again"),
                ("commands after a killed job", "task_killed", "commands_again"),
                ("the same of MinHash", "task_killed_minhash", "commands_again"),
                ("its jobs that stay in the queue", "task_killed_minhash", "jobs_that_never_start"),
                ("CPU seconds of the jobs of that command", "task_killed", "cpu_s_again"),
                ("the same of MinHash, with its other stages", "task_killed_minhash", "cpu_s_again"),
                ("a finished file that is cut is made again (1: yes)", "file_cut", "made_again"),
            )
            for side in ("datatrove", "relayrun")
        ),
    ],
    "small_files": [
        *(
            Row(f"CPU time of datatrove over ours: 20,000 files of 4 kB, {way}", f"{way}.cpu_speed_up", ".1f", least=10)
            for way in ("plain, 1 worker", "plain, 2 workers", "gzip, 1 worker", "gzip, 2 workers")
        ),
        *(
            Row(f"the same of parquet of 10 MB, tokenizer of {family}", f"{family}.cpu_speed_up", ".1f")
            for family in ("Llama 3", "GPT-2", "Llama 2")
        ),
    ],
    "start": [
        Row("CPU seconds of `relayrun --help`", "help", ".2f", most=0.1),
        Row("CPU seconds of `relayrun status` of a run with three attempts", "status", ".2f", most=0.3),
        Row("the same of three runs with 222 attempts", "status_large", ".2f"),
        Row("load of the machine meanwhile; on a busy one they cost more", "load_average", ".1f"),
    ],
    "data_order": [
        Row("batches per second over Megatron's data set, length 512", "throughput.0.ratio", ".1f", least=2),
        Row("batches per second over Megatron's data set, length 4096", "throughput.2.ratio", ".1f", least=1.3),
    ],
}


COMMANDS = {
    "curation_slurm_faults": "curation_slurm.py --megabytes 8 --faults",
    "many_nodes": "_many_nodes.py",
    "kills_often": "kills.py --ranks-per-node 1 --kill-every 12",
    "kills_cost": "kills.py --turns 3 --minutes 3 --spares 0",
}
"""What gave a result that is not named after its script."""


def render() -> str:
    """The page."""
    parts = [
        "# Benchmarks",
        "",
        "`make bench` runs the scripts of `benchmarks/` and writes this page from `benchmarks/results/`: median, and",
        "smallest to largest, of rounds that take turns with the peer in one run. A target is reached where all of",
        "that is on its side; where it covers both sides, that is undecided. Only the last section is about GPUs.",
        "Checkouts before the first release, 0.2.0, called themselves 0.1.0.",
        "",
        "<!-- benchmarks/_report.py wrote this -->",
    ]
    for name, rows in SECTIONS.items():
        file = RESULTS / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        parts += [
            "",
            f"## `benchmarks/{COMMANDS.get(name, f'{name}.py')}`",
            f"{result['date'][:10]}, {result['cpus']} CPUs, {versions}.",
            "",
            "| what | measured | wanted | reached |",
            "|---|---|---|---|",
            *(line for row in rows for line in row.lines(result["figures"])),
        ]
    return "\n".join([*parts, *gpus()]) + "\n"


def gpus() -> list[str]:
    """The section of GPUs: the table of each check, by device."""
    parts = ["", "## `make gpu-check`"]
    files = sorted(RESULTS.glob("gpu-*.json"))
    if not files:
        return [*parts, "", "Not run on a GPU yet. [The check of a GPU](../how-to/gpu-check.md) says what it measures."]
    parts += ["", "[The check of a GPU](../how-to/gpu-check.md) says what is measured, and which target is a promise."]
    for result in sorted((json.loads(file.read_text()) for file in files), key=lambda found: found["date"]):
        where = f"{result['gpus']} x {result['device']}"
        parts += [
            "",
            f"### {where}",
            f"{result['date'][:10]}, {result['seconds']:.0f} s. {result.get('note', '')}".rstrip(),
            "",
            "| part | what | measured | wanted | reached |",
            "|---|---|---|---|---|",
        ]
        for row in report.check_rows(result):
            cells = (row.part, row.what, row.value, row.target, row.verdict)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return parts


if __name__ == "__main__":
    PAGE.write_text(render())
