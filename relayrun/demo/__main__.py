"""`make demo`: raw text to a trained model on one machine, by the commands that a user would type.

    python -m relayrun.demo [--slurm] [--size 3m] [--megabytes 24] [--set NAME=VALUE]

With --slurm the dumps are tokenized by jobs and the training is a chain of jobs over two nodes, on the
cluster that SLURM_CONF names (`make demo-slurm` starts one). Everything lies in demo-output/ and
logs/runs/relayrun/demo (demo-slurm); a second demo removes the first one's.
Exits 1 if the model has not learned: its held-out loss must lie well below the unigram entropy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from relayrun import places
from relayrun.config import compose, yamlfile
from relayrun.config.schema import RunConfig
from relayrun.demo import continuation, corpus, unigram
from relayrun.errors import RelayrunError, run_main
from relayrun.monitoring import report
from relayrun.monitoring.follow import Follower
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler.choose import for_plan
from relayrun.tokenization.train_tokenizer import train_tokenizer

OUTPUT = places.CODE / "demo-output"
MARKER = OUTPUT / ".made-by-relayrun-demo"
MARGIN = 0.3
"""Nats per token that the held-out loss must lie below the unigram entropy."""

console = Console(stderr=True, highlight=False)


def main() -> int:
    """Make the corpus, tokenize, mix, train and export; return 1 if the model has not learned."""
    parser = argparse.ArgumentParser(prog="make demo", description="Raw text to a trained model on this machine.")
    parser.add_argument(
        "--size",
        choices=sorted(
            path.stem.removeprefix("llama-") for path in places.shared("configs/models").glob("llama-*m.yaml")
        ),
        default="3m",
    )
    parser.add_argument("--slurm", action="store_true", help="jobs of the cluster that SLURM_CONF names")
    parser.add_argument("--megabytes", type=float, default=24.0, help="text of the corpus")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a setting of the run's config",
    )
    options = parser.parse_args()
    started = time.monotonic()
    model = yamlfile.read(places.shared(f"configs/models/llama-{options.size}.yaml")).values["model"]
    overrides = [*(f"model.{name}={json.dumps(value)}" for name, value in model.items()), *options.overrides]
    config_file = places.shared("configs/runs") / ("demo-slurm.yaml" if options.slurm else "demo.yaml")
    config = compose.native(compose.load(config_file, overrides))
    run = Run(Path(config.run_dir or ""))
    clear_former(run, f"{config.project}/{config.name}")

    headline("1. text: documentation and sources of this Python installation, as parquet")
    made = corpus.build_corpus(OUTPUT / "text", megabytes=options.megabytes)
    console.print(str(made))
    headline("2. tokenizer: byte-level BPE, trained on this text")
    tokenizer = train_tokenizer([OUTPUT / "text" / name for name in ("docs", "code")], OUTPUT / "tokenizer")
    console.print(str(tokenizer))

    headline("3. tokens: dumps, tokenized with datatrove as jobs")
    for name, dumps in (("docs", 2), ("code", 2), ("heldout", 1)):
        folder = OUTPUT / "dumps" / name
        run_program(
            "scripts/tokenization/prepare_dumps.py",
            "--dataset-folder",
            OUTPUT / "text" / name,
            "--preprocessing-metadata-folder",
            folder,
            "--n-dumps",
            dumps,
        )
        executor = ("--executor", "slurm", "--wait") if options.slurm else ("--executor", "local")
        run_program("launchers/submit_tokenization.py", write_tokenization_config(name, folder, tokenizer), *executor)

    headline("4. mixture: a folder of links, 70 % documentation and 30 % code")
    tokens = OUTPUT / "tokens" / "demo"
    run_program(
        "scripts/tools/create_data_mixture.py",
        "--folders",
        tokens / "docs",
        tokens / "code",
        "--weights",
        0.7,
        0.3,
        "--output",
        OUTPUT / "mixture",
    )

    headline("5. training: a Llama on two ranks, through as many jobs as the time limit asks for")
    run_program("launchers/submit.py", config_file, *(f"--set={text}" for text in overrides))
    if options.slurm:
        wait_for_chain(run)

    headline("6. the model as a Hugging Face folder")
    arguments = ("export", "hf", run.path, "--output", OUTPUT / "hf", "--test-logits")
    run_python([Path(sys.executable).with_name("relayrun"), *arguments], shown=["relayrun", *arguments])

    headline("7. report")
    return show(run, config, seconds=time.monotonic() - started)


def write_tokenization_config(dataset: str, metadata_folder: Path, tokenizer: Path) -> Path:
    """The YAML of one dataset's tokenization, as a user would write it."""
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
    path.write_text(yamlfile.dump(settings), encoding="utf-8")
    return path


def show(run: Run, config: RunConfig, *, seconds: float) -> int:
    """Print what was made; return 1 if the model has not learned."""
    summary = report.read_report(run)
    output = Console(highlight=False)
    output.width = max(output.width, 110)
    output.print(report.attempts_table(summary))
    if not summary.validation.get("heldout"):
        raise RelayrunError(
            "the training ended before its last iteration", where=run.path, hint=f"relayrun status {run.path} says why"
        )
    print(report.terminal_curve(summary))
    picture = run.path / "loss.png"
    report.write_png(summary, picture)
    iteration, loss = summary.validation["heldout"][-1]
    entropy = unigram.entropy(config, run, "heldout")
    learned = loss <= entropy - MARGIN
    print(
        f"held-out loss {loss:.4f} nats per token at iteration {iteration}; unigram entropy of the same text "
        f"{entropy:.4f}; difference {entropy - loss:.4f} (at least {MARGIN} wanted): "
        f"{'learned' if learned else 'NOT LEARNED'}"
    )
    for what, path in (
        ("text", OUTPUT / "text"),
        ("tokens", OUTPUT / "tokens"),
        ("mixture", OUTPUT / "mixture"),
        ("run directory", run.path),
        ("model", OUTPUT / "hf"),
        ("loss curve", picture),
        ("logs", places.CODE / "logs/slurm/training"),
    ):
        print(f"{what:14} {path}")
    prompt = continuation.first_words(OUTPUT / "text" / "heldout")
    print(
        f"{seconds:.0f} s in all\nA line of the held-out text, and how the exported model goes on:\n"
        f"  {prompt} | {continuation.continued(OUTPUT / 'hf', prompt)}"
    )
    return 0 if learned else 1


def wait_for_chain(run: Run) -> None:
    """Follow a chain on Slurm until none of its jobs is left."""
    plan = Plan.load(run)
    follower = Follower(run, total_steps=plan.total_steps)
    seen: dict[str, str] = {}
    while jobs := {job.id: job.state for job in for_plan(plan, run).jobs(plan)}:
        if jobs != seen:
            console.print(
                time.strftime("%H:%M:%S")
                + " queue: "
                + ", ".join(f"job {number} {state.lower()}" for number, state in jobs.items())
            )
        seen = jobs
        follower.poll()
        time.sleep(1)


def clear_former(run: Run, name: str) -> None:
    """Remove what an earlier demo made, and nothing else. Raises RelayrunError."""
    if OUTPUT.exists():
        if not MARKER.exists():
            raise RelayrunError("this folder was not made by the demo", where=OUTPUT, hint="move it away")
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir()
    MARKER.touch()
    if run.path.exists():
        plan = Plan.load(run)
        if plan.run != name:
            raise RelayrunError("this run directory is not the demo's", where=run.path, hint="move it away")
        shutil.rmtree(run.path)


def run_program(program: str, *arguments: object) -> None:
    """Run one of the project's programs as a user would, and show the command. Raises RelayrunError."""
    run_python([places.shared(program), *arguments], shown=[program, *arguments])


def run_python(command: Sequence[object], *, shown: Sequence[object]) -> None:
    """Run a Python program, and show it as a user would write it. Raises RelayrunError."""
    words = shlex.join(map(str, shown))
    console.print("[bold]$[/] " + words, soft_wrap=True)
    if subprocess.run([sys.executable, *map(str, command)], cwd=places.CODE, check=False).returncode:
        raise RelayrunError("this step of the demo failed; its message stands above", where=words)


def headline(text: str) -> None:
    console.print(f"\n[bold]== {text}[/]", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
