"""`make demo`: raw text to a trained model on one machine, with the commands that a user would type.

    python -m scripts.demo [--slurm] [--size 3m] [--megabytes 24] [--set NAME=VALUE]

The first job trains a third of the steps and measures the time of a start and of a step on this machine. The time
limits of the next jobs follow from that. At the end the loss is compared with the unigram entropy, and the model
continues the beginning of a held-out story before and after its training.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.checkpoint_records import Lineage, resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.rundir.time_limit import GRACE_SAVES, measured_grace_period, start_seconds
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import InputError, RelayrunError, run_main
from relayrun.files import read_json_lines
from relayrun.lab import corpus
from relayrun.slurmtime import format_time
from relayrun.tokens.mixture.build_datasets import validation_set
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer
from relayrun.watch.follow import ProgressFollower
from relayrun.watch.report import page, report_data
from relayrun.watch.report.report_data import RunReportData
from scripts.demo import stories

PROMPT_WORDS = 12
NEW_TOKENS = 60
OUTPUT = places.CODE_ROOT / "demo-output"
OUTPUT_MARKER = OUTPUT / ".made-by-relayrun-demo"
MARGIN = 1.0
"""Nats per token that the held-out loss must lie below the unigram entropy."""
MIXTURE_WEIGHTS = {"stories": 0.8, "docs": 0.12, "code": 0.08}
"""Shares of the mixture."""
JOB_SHARE = 0.55
"""Share of the remaining iterations for which the next jobs' time limit suffices, so that two jobs are needed."""
CHART_WIDTH = 48
"""Characters of the chart of attempts."""
MAX_EMPTY_JOBS = 4
"""Chains in a row without a new checkpoint, each with twice the time of the previous one, before the demo gives up."""


def say(text: str) -> None:
    """Print a line for the reader of the demo."""
    print(text, file=sys.stderr, flush=True)


def first_heldout_words(folder: Path, *, words: int) -> str:
    """Return the first words of the first text in the parquet files of `folder`. Raises InputError if there is none."""
    for path in sorted(folder.glob("*.parquet")):
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            return " ".join(text.split()[:words])
    raise InputError("no text in these files", where=folder)


def continue_before_and_after(model_folder: Path, prompt: str) -> tuple[str, str]:
    """Continue `prompt` with random weights and with those of a Hugging Face folder, both with one seed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    trained: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    set_seed(0)
    untrained: Any = type(trained)(trained.config)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    found = []
    for model in (untrained, trained):
        set_seed(0)
        ids = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=0.7,
            top_k=20,
            pad_token_id=tokenizer.eos_token_id,
        )
        text = tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append(" ".join(text.split()))
    return found[0], found[1]


def unigram_entropy(config: RunConfig, run: Run, name: str) -> float:
    """Return the entropy in nats of the tokens that an evaluation on set `name` predicts."""
    manifest = Manifest.read(run.manifest)
    training = config.training
    order = validation_set(config, manifest, name)
    samples = min(training.eval_steps * training.global_batch_size, len(order))
    counts = np.zeros(manifest.vocabulary_size, dtype=np.int64)
    for number in range(samples):
        counts += np.bincount(order.row(number).tokens[1:], minlength=manifest.vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def main() -> int:
    """Make the corpus, tokenize, mix, train and export; return 1 if the model has not learned."""
    parser = argparse.ArgumentParser(prog="make demo", description="Raw text to a trained model on this machine.")
    models = places.shared_file("configs/models").glob("llama-*m.yaml")
    sizes = sorted(path.stem.removeprefix("llama-") for path in models)
    parser.add_argument("--size", choices=sizes, default="3m")
    parser.add_argument("--slurm", action="store_true", help="jobs of the cluster that SLURM_CONF names")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of stories, and as much documentation and code")
    words = "override a setting of the run's config"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE", help=words)
    options = parser.parse_args()
    started = time.monotonic()
    model = yaml_file.read_yaml(places.shared_file(f"configs/models/llama-{options.size}.yaml")).values["model"]
    overrides = [*(f"model.{name}={json.dumps(value)}" for name, value in model.items()), *options.overrides]
    config_file = places.shared_file("configs/runs") / ("demo-slurm.yaml" if options.slurm else "demo.yaml")
    config = resolve.require_native(resolve.load_run_config(config_file, overrides))
    run = Run(Path(config.run_dir or ""))
    remove_former_output(run, f"{config.project}/{config.name}")

    print_headline("1. text: made-up stories, and documentation and sources of this Python installation, as parquet")
    told = stories.build_stories(OUTPUT / "stories", megabytes=options.megabytes)
    corpus.build_corpus(OUTPUT / "text", megabytes=options.megabytes)
    texts = {"stories": told.train, "heldout": told.heldout}
    texts |= {name: OUTPUT / "text" / name for name in ("docs", "code")}
    first = first_heldout_words(told.train, words=16)
    say(f"{told.documents:,} stories; the first words of one: {first} ...")
    print_headline("2. tokenizer: byte-level BPE, trained on this text")
    tokenizer = train_tokenizer([texts[name] for name in MIXTURE_WEIGHTS], OUTPUT / "tokenizer")
    say(str(tokenizer))

    print_headline("3. tokens: dumps, tokenized with datatrove as jobs")
    for name, folder in texts.items():
        dumps = OUTPUT / "dumps" / name
        options_of_dumps = ("--dataset-folder", folder, "--preprocessing-metadata-folder", dumps)
        number = 1 if name == "heldout" else 2
        run_program("scripts/tokenization/prepare_dumps.py", *options_of_dumps, "--n-dumps", number)
        executor = ("--executor", "slurm", "--wait") if options.slurm else ("--executor", "local")
        run_program("launchers/submit_tokenization.py", write_tokenization_config(name, dumps, tokenizer), *executor)

    shares = ", ".join(f"{share:.0%} {name}" for name, share in MIXTURE_WEIGHTS.items())
    print_headline(f"4. mixture: a folder of links, {shares}")
    folders = ("--folders", *(OUTPUT / "tokens" / "demo" / name for name in MIXTURE_WEIGHTS))
    weights = ("--weights", *MIXTURE_WEIGHTS.values(), "--output", OUTPUT / "mixture")
    run_program("scripts/tools/create_data_mixture.py", *folders, *weights)

    print_headline("5. training: a Llama on two ranks, through as many jobs as their time limits ask for")
    train_to_end(run, config, [config_file, *(f"--set={text}" for text in overrides)], slurm=options.slurm)

    print_headline("6. the model as a Hugging Face folder")
    run_relayrun("export", "hf", run.path, "--output", OUTPUT / "hf", "--test-logits")

    print_headline("7. report")
    return print_results(run, config, seconds=time.monotonic() - started)


def write_tokenization_config(dataset: str, metadata_folder: Path, tokenizer: Path) -> Path:
    """Write the YAML of one dataset's tokenization, as a user would; return its path."""
    path = OUTPUT / f"tokenization-{dataset}.yaml"
    settings = {
        "tokenizer": str(tokenizer),
        "tokenizer_name": "demo",
        "dataset_name": dataset,
        "metadata_folder": str(metadata_folder),
        "output_folder": str(OUTPUT / "tokens"),
        "tasks": 4,
        "workers": 2,
        "executor": "local",
        "max_parallel": 2,
    }
    path.write_text(yaml_file.dump_yaml(settings), encoding="utf-8")
    return path


def train_to_end(run: Run, config: RunConfig, submit: Sequence[object], *, slurm: bool) -> None:
    """Train to the last step. Raises RelayrunError if several chains in a row save nothing."""
    third = f"--set=training.stop_after={config.training.steps // 3}"
    run_chain(run, partial(run_program, "launchers/submit.py", *submit, third, chain=True), slurm=slurm)
    fruitless = 0
    while (done := resume_point(run).iteration) < config.training.steps:
        work, grace = work_and_grace_time(run, left=config.training.steps - done)
        unit = 60 if slurm else 1  # Slurm counts minutes
        limit = math.ceil((work * 2**fruitless + grace) / unit) * unit
        grace = limit - math.ceil(work * 2**fruitless)
        share = "about half of the iterations that are left"
        say(f"jobs of {limit} s, which leave {grace} s before that: {share}")
        changes = ("training.stop_after=null", f"job.time={format_time(limit)}", f"chain.grace_period={grace}")
        resume = ("resume", run.path, *(f"--set={change}" for change in changes))
        run_chain(run, partial(run_relayrun, *resume, chain=True), slurm=slurm)
        fruitless = fruitless + 1 if resume_point(run).iteration == done else 0
        if fruitless == MAX_EMPTY_JOBS:
            why = stop_reason(run) or "its jobs have ended"
            words = f"{MAX_EMPTY_JOBS} chains in a row saved nothing behind iteration {done}: {why}"
            hint = f"relayrun status {run.path} says what its jobs did, relayrun logs {run.path} what they printed"
            raise RelayrunError(words, where=run.path, hint=hint)


def run_chain(run: Run, start: Callable[[], bool], *, slurm: bool) -> None:
    """Start a chain, and wait for its end. Raises RelayrunError if no job of it began."""
    before = run.attempt_numbers()
    if start() and run.attempt_numbers() == before:
        raise RelayrunError("no job of this chain began; why stands above", where=run.path)
    wait_for_chain(run, slurm=slurm)


def work_and_grace_time(run: Run, *, left: int) -> tuple[float, float]:
    """Return the seconds for a little more than half of the iterations left, and the grace period.

    From the newest attempt: the next one takes as long for everything besides steps (start, evaluation, saves).
    """
    rows = report_data.read_report_data(run).attempts if run.attempt_numbers() else []
    attempts = [row for row in rows if row.seconds is not None]
    trained = [row for row in attempts if row.steps is not None]
    if not trained:
        took = sum(row.seconds or 0.0 for row in attempts) or 60.0
        return took, took
    newest = trained[-1]
    steps = [line for line in read_json_lines(run.attempt(newest.number).metrics) if "step_seconds" in line]
    step: float = statistics.mean(line["step_seconds"] for line in steps)
    besides: float = max((newest.seconds or 0.0) - step * len(steps), *start_seconds(run))
    grace = measured_grace_period([step], Lineage(run).newest_saves(GRACE_SAVES), floor=0.0, ceiling=math.inf)
    return besides + step * JOB_SHARE * left, besides if grace is None else grace


def attempts_chart(summary: RunReportData) -> str:
    """Return the iterations of each attempt as bars, one per line."""
    trained = [(row, *row.steps) for row in summary.attempts if row.steps is not None]
    lines = []
    for row, first, last in trained:
        begin, end = (round(CHART_WIDTH * at / trained[-1][2]) for at in (first - 1, last))
        bar = " " * begin + "█" * max(1, end - begin)
        why = row.reason.partition(";")[0]
        lines.append(f"  job {row.number}  {bar:{CHART_WIDTH}}  {first}-{last}: {why}")
    return "\n".join(lines)


def print_results(run: Run, config: RunConfig, *, seconds: float) -> int:
    """Print the results; return 1 if the model has not learned."""
    summary = report_data.read_report_data(run)
    report_data.attempts_table(summary).print()
    if "heldout" not in summary.validation:
        hint = f"relayrun status {run.path} says why"
        raise RelayrunError("the training ended before its last iteration", where=run.path, hint=hint)
    report = run.path / "report.html"
    report.write_text(page.report_page([summary], now=time.time()), encoding="utf-8")
    for what, path in (
        ("text", f"{OUTPUT / 'stories'}, {OUTPUT / 'text'}"),
        ("tokens", OUTPUT / "tokens"),
        ("mixture", OUTPUT / "mixture"),
        ("run directory", run.path),
        ("model", OUTPUT / "hf"),
        ("loss curve", report),
        ("logs", places.CODE_ROOT / "logs/slurm/training"),
    ):
        print(f"{what:14} {path}")
    print("The relay: each job went on from the checkpoint of the one before.\n" + attempts_chart(summary))
    held_out = summary.validation["heldout"]
    iteration, loss = int(held_out.x[-1]), float(held_out.y[-1])
    entropy = unigram_entropy(config, run, "heldout")
    learned = loss <= entropy - MARGIN
    print(
        f"\nheld-out loss {loss:.4f} nats per token at iteration {iteration}; unigram entropy of the same text "
        f"{entropy:.4f}; difference {entropy - loss:.4f} (at least {MARGIN} wanted): "
        f"{'learned' if learned else 'NOT LEARNED'}"
    )
    prompt = first_heldout_words(OUTPUT / "stories/heldout", words=PROMPT_WORDS)
    before, after = continue_before_and_after(OUTPUT / "hf", prompt)
    print(
        f"\nThe first words of a story that it never saw, and how the model goes on:\n  {prompt} ...\n"
        f"  before training: {before}\n  after training:  {after}\n\n"
        f"{seconds:.0f} s in all. The next command, a project of your own:\n"
        f"  {Path(sys.executable).parent / 'relayrun'} init my-project --cluster local"
    )
    return 0 if learned else 1


def wait_for_chain(run: Run, *, slurm: bool) -> None:
    """Follow a chain on Slurm until no job is left; a local submit has waited itself."""
    if not slurm:
        return
    plan = Plan.load(run)
    follower = ProgressFollower(run, total_steps=plan.total_steps)
    seen: dict[str, str] = {}
    while jobs := {job.id: job.state for job in scheduler_for_plan(plan, run).jobs(plan)}:
        if jobs != seen:
            states = ", ".join(f"job {number} {state.lower()}" for number, state in jobs.items())
            say(f"{time.strftime('%H:%M:%S')} queue: {states}")
        seen = jobs
        follower.poll()
        time.sleep(1)


def remove_former_output(run: Run, name: str) -> None:
    """Remove the output of an earlier demo, and nothing else. Raises RelayrunError."""
    if OUTPUT.exists():
        if not OUTPUT_MARKER.exists():
            raise RelayrunError("this folder was not made by the demo", where=OUTPUT, hint="move it away")
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir()
    OUTPUT_MARKER.touch()
    if run.path.exists():
        if Plan.load(run).run != name:
            raise RelayrunError("this run directory is not the demo's", where=run.path, hint="move it away")
        shutil.rmtree(run.path)


def run_program(program: str, *arguments: object, chain: bool = False) -> bool:
    """Run a program of the project and print its command. Raises RelayrunError.

    `chain`: it waits for a chain, whose records tell the result; return True if it failed.
    """
    return run_python([places.shared_file(program), *arguments], shown=[program, *arguments], chain=chain)


def run_relayrun(*arguments: object, chain: bool = False) -> bool:
    """Run a `relayrun` command like `run_program`."""
    command = [Path(sys.executable).with_name("relayrun"), *arguments]
    return run_python(command, shown=["relayrun", *arguments], chain=chain)


def run_python(command: Sequence[object], *, shown: Sequence[object], chain: bool = False) -> bool:
    """Run a Python program, shown as a user would type it; return True if it failed. Raises RelayrunError."""
    words = shlex.join(map(str, shown))
    say(f"$ {words}")
    failed = subprocess.run([sys.executable, *map(str, command)], cwd=places.CODE_ROOT, check=False).returncode
    if failed and not chain:
        raise RelayrunError("this step of the demo failed; its message stands above", where=words)
    return failed != 0


def print_headline(text: str) -> None:
    say(f"\n== {text}")


if __name__ == "__main__":
    sys.exit(run_main(main))
