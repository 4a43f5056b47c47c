"""Published launchers with their sizes shrunk train on CPUs: RELAYRUN_LAUNCHERS_DIR names a folder with launchers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.files import read_json_lines
from relayrun.submit.adopt import adopt
from tests.checkouts import ON_CPUS, VOCABULARY, checkout_of, config, make_shard
from tests.checkouts.alone import train_alone
from tests.waiting import wait_for
from tests.workspace import steps

from .test_local_megatron import job_pid, rank_pids, reached

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(3000),
    pytest.mark.skipif("RELAYRUN_LAUNCHERS_DIR" not in os.environ, reason="RELAYRUN_LAUNCHERS_DIR names no launchers"),
]

PRETRAINING = {"8B": "submit_apertus_8b.sh", "70B": "submit_apertus_70b.sh"}
LONGER = {
    "8b-8k.sh": ("8B", "COOLDOWN_CKPT_8B"),
    "8b-16k.sh": ("8B", "8K_LONG_CTX_CKPT_8B"),
    "8b-32k.sh": ("8B", "16K_LONG_CTX_CKPT_8B"),
    "8b-64k.sh": ("8B", "32K_LONG_CTX_CKPT_8B"),
    "70b-8k.sh": ("70B", "COOLDOWN_CKPT_70B"),
    "70b-16k.sh": ("70B", "8K_LONG_CTX_CKPT_70B"),
    "70b-32k_60b.sh": ("70B", "16K_LONG_CTX_CKPT_70B"),
    "70b-64k_30b.sh": ("70B", "32K_LONG_CTX_CKPT_70B"),
}
"""Launchers of longer contexts: the model, and the folder of checkpoints below /PATH/TO with which they begin."""

SIZES: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "seq-length": lambda given: int(given) // 64,
    "max-position-embeddings": lambda given: int(given) // 64,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "rampup-batch-size": [2, 2, 16],
    "train-samples": 84,
    "lr-warmup-samples": 8,
    "lr-wsd-decay-samples": 24,
    "train-iters": 24,
    "exit-interval": 20,
    "lr-warmup-iters": 2,
    "ademamix-beta3-warmup": 20,
    "ademamix-alpha-warmup": 20,
    "save-interval": 5,  # none of the ramp's borders, at which Megatron-LM saves too, and then not twice
    "num-workers": 0,
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": lambda given: min(int(given), 2),
    "context-parallel-size": 1,  # of more this checkout's attention without TransformerEngine knows nothing
}
"""What takes the place of a launcher's own value, if it has the flag. Goldfish loss needs 50 tokens or more. The ramp's
eight iterations have two samples each, later ones four: 84 are 25 iterations."""
NOT_ON_CPUS: dict[str, Any] = {
    "qknorm-impl": False,  # these four need TransformerEngine or CUDA
    "overlap-param-gather": False,
    "async-save": False,
    "sequence-parallel": False,
    "use-distributed-optimizer": False,  # it needs a fused AdEMAMix
    "num-layers-per-virtual-pipeline-stage": False,  # it counts on the order of a CUDA stream: over gloo losses are NaN
    "overlap-p2p-communication-warmup-flush": False,
}
PHASE = 44
"""Samples of the first phase of data: 15 iterations."""

Kill = Callable[[Run], None]
Steps = dict[int, tuple[str, str]]


def shrunk(folder: Path, name: str, checkout: Path, **folders: Path) -> dict[str, Any]:
    """The settings that `relayrun adopt` makes of a launcher, with other sizes, for ranks on CPUs.

    `folders`: those below /PATH/TO that are there.
    """
    (launcher,) = Path(os.environ["RELAYRUN_LAUNCHERS_DIR"]).rglob(name)
    site = folder / "site"
    text = re.sub("CHANGE_THIS|/PATH/TO", str(site), launcher.read_text())
    for name_there, there in folders.items():
        text = text.replace(f"{site}/{name_there}\n", f"{there}\n")
    (folder / name).write_text(text)
    found = adopt(folder / name, {"USER": "ada", "SCRATCH": str(site)}, site="local", checkout=str(checkout))
    assert found.errors == []
    settings = found.settings
    own = settings["megatron_lm"]["args"]
    sizes = {flag: size(own[flag]) if callable(size) else size for flag, size in SIZES.items() if flag in own}
    on_cpus = {flag: value or True for flag, value in re.findall(r"--(\S+)(?: ([a-z]\S*))?", " ".join(ON_CPUS.split()))}
    tokenizer = {"tokenizer-type": "NullTokenizer", "tokenizer-model": False, "vocab-size": VOCABULARY + 5}
    own |= sizes | on_cpus | tokenizer | NOT_ON_CPUS
    ranks = own["tensor-model-parallel-size"] * own["pipeline-model-parallel-size"]
    settings["data"] = {"tokenizer": "none", "datasets": [str(folder / "data")]}
    settings["job"] = {"time": "30", "nodes": 1, "ntasks_per_node": ranks}
    config(folder, checkout)  # the Python with stand-ins for CUDA
    settings["cluster"] = {"name": "local", "scheduler": "local", "python": str(folder / "python")}
    return settings


def submit(folder: Path, settings: dict[str, Any], *kills: Kill, slow: str = "", **changes: Any) -> Run:
    """Submit a run config in `folder`, disturb its chain, and wait for its end.

    `slow`: as MEGATRON_ON_CPU_SLOW. `changes`: of sections.
    """
    run = Run(folder / "run")
    changed = settings | {"name": folder.name, "run_dir": str(run.path)}
    changed |= {section: {**settings.get(section, {}), **change} for section, change in changes.items()}
    changed["cluster"] = settings["cluster"] | {"environment": {"MEGATRON_ON_CPU_SLOW": slow} if slow else {}}
    path = folder.with_suffix(".yaml")
    path.write_text(dump_yaml(changed))
    chain = threading.Thread(target=main, args=(["submit", str(path)],))
    chain.start()
    for kill in kills:
        kill(run)
    chain.join(900)
    assert stop_reason(run) is not None
    return run


def kill_a_rank(iteration: int) -> Kill:
    def kill(run: Run) -> None:
        wait_for(lambda: run.attempt(1).metrics.exists() and reached(run, iteration), 300)
        os.kill(rank_pids(run)[1], signal.SIGKILL)

    return kill


def ask_the_job(iteration: int, attempt: int = 1) -> Kill:
    def ask(run: Run) -> None:
        wait_for(lambda: run.attempt(attempt).metrics.exists() and reached(run, iteration, attempt), 300)
        os.kill(job_pid(run, attempt), signal.SIGUSR2)

    return ask


def alone(run: Run, folder: Path, *flags: str, load: Path | None = None) -> Steps:
    """Steps of the checkout under torchrun, without relayrun, with a new start where an attempt of `run` began.

    `flags`, `load`: of the first start.
    """
    plan, found = Plan.read(run.plan), Steps()
    assert plan is not None
    begins = [begin.base_iteration for number in run.attempt_numbers() if (begin := run.attempt(number).read_begin())]
    words, checkout = plan.trainer_settings["run"], Path(plan.trainer_settings["dir"])
    for end in [*begins[1:], plan.total_steps]:
        now = ["--exit-interval", str(end), *flags]
        found |= train_alone(words, *now, checkout=checkout, ranks=plan.ntasks_per_node, save=folder, load=load)
        flags, load = (), None
    return found


def exact(settings: dict[str, Any]) -> bool:
    """Whether this checkout resumes bit for bit: with pipeline stages it does not, see test_local_megatron_alone.py."""
    return bool(settings["megatron_lm"]["args"]["pipeline-model-parallel-size"] == 1)


def losses(found: Steps) -> list[float]:
    return [float.fromhex(found[iteration][0]) for iteration in sorted(found)]


def consumed(*runs: Run) -> list[int]:
    return [line["consumed_samples"] for run in runs for line in read_json_lines(run.metrics_view) if "loss" in line]


@pytest.mark.parametrize("model", PRETRAINING)
def test_a_shrunk_launcher_trains_through_kills_and_a_phase_of_data(tmp_path: Path, model: str) -> None:
    """AdEMAMix, xIELU, goldfish loss, a ramp of the batch size, a length in samples: as the launcher says them."""
    checkout = checkout_of(MegatronDialect.SWISS_AI)
    settings = shrunk(tmp_path, PRETRAINING[model], checkout)
    make_shard(tmp_path / "second", seed=2)
    args, second = settings["megatron_lm"]["args"], {"datasets": [str(tmp_path / "second")]}
    kills: dict[str, tuple[Sequence[Kill], Sequence[Kill]]]
    kills = {"whole": ([], []), "cut": ([kill_a_rank(10)], [ask_the_job(18)])}
    found: dict[str, Steps] = {}
    for name, (of_first, of_second) in kills.items():
        one = {"args": args | {"train-samples": PHASE}}
        first = submit(tmp_path / f"{name}-1", settings, *of_first, slow="9:1" if of_first else "", megatron_lm=one)
        changes = {"checkpoint": {"interval": 5, "load": f"{first.checkpoints}:15"}, "data": second}
        two = {"args": {flag: value for flag, value in args.items() if flag != "save-interval"} | {"seed": 29}}
        slow = "2:2" if of_second else ""
        last = submit(tmp_path / f"{name}-2", settings, *of_second, slow=slow, megatron_lm=two, **changes)
        found[name] = steps(first) | steps(last)
        assert consumed(first, last) == [*range(2, 18, 2), *range(20, 85, 4)]
        assert consumed(first)[-1] == PHASE
        assert [len(run.attempt_numbers()) for run in (first, last)] == [1 + len(of_first), 1 + len(of_second)]
    assert sorted(found["whole"]) == list(range(1, 26))
    if exact(settings):
        assert found["cut"] == found["whole"]
        return
    by_itself = alone(first, tmp_path / "alone-1") | alone(last, tmp_path / "alone-2", load=tmp_path / "alone-1")
    assert found["cut"] == by_itself
    assert losses(found["cut"]) == pytest.approx(losses(found["whole"]), rel=1e-4)


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the checkpoints of an earlier run of a model."""
    made: dict[str, Path] = {}

    def make(model: str) -> Path:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            settings = shrunk(folder, PRETRAINING[model], checkout_of(MegatronDialect.SWISS_AI))
            args = settings["megatron_lm"]["args"]
            args |= {"train-samples": 8, "lr-warmup-samples": 2, "lr-wsd-decay-samples": 2}
            made[model] = submit(folder / "earlier", settings, megatron_lm={"args": args}).checkpoints
        return made[model]

    return make


@pytest.mark.parametrize("name", LONGER)
def test_a_shrunk_launcher_of_a_longer_context_goes_on_with_an_earlier_model(
    tmp_path: Path, name: str, earlier_run: Callable[[str], Path]
) -> None:
    """Its own `--load`, with `--finetune --no-load-rng` in the first job alone, other data and other lengths."""
    model, folder = LONGER[name]
    shutil.copytree(earlier_run(model), tmp_path / "earlier")
    checkout = checkout_of(MegatronDialect.SWISS_AI)
    settings = shrunk(tmp_path, name, checkout, **{folder: tmp_path / "earlier"})
    assert settings["checkpoint"]["load"] == str(tmp_path / "earlier")
    args = settings["megatron_lm"]["args"]
    last, leaves = args["train-iters"], "exit-interval" in args  # a job leaves there, and the next one goes on
    found: dict[str, Steps] = {}
    for run_name, kills in {"whole": (), "cut": (kill_a_rank(8), ask_the_job(13, attempt=2))}.items():
        own = {"interval": 5, "async_save": False}
        run = submit(tmp_path / run_name, settings, *kills, slow="4:1" if kills else "", checkpoint=own)
        found[run_name] = steps(run)
        assert consumed(run) == list(range(4, 4 * last + 1, 4))
        assert len(run.attempt_numbers()) == 1 + len(kills) + leaves
    assert sorted(found["whole"]) == list(range(1, last + 1))
    if exact(settings):
        assert found["cut"] == found["whole"]
        return
    assert found["cut"] == alone(run, tmp_path / "alone", "--finetune", "--no-load-rng", load=tmp_path / "earlier")
    assert losses(found["cut"]) == pytest.approx(losses(found["whole"]), rel=1e-4)
