"""A checkout's own parser says which flags it takes; where it cannot be asked, its text warns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from relayrun.config.compose.megatron_flags import FIXED_FLAGS, FLAG_TABLE
from relayrun.submit.megatron_lm.checkout import Checkout, ParserAnswer, ask_parser
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.submit.megatron_lm.programs import parse_flags
from tests.megatron_lm.stand_in import stand_in

GOOD = Flag(name="num-layers", values=("2",), source="model.num_layers")
UNKNOWN = Flag(name="num-layerz", values=("2",), source="megatron_lm.args")
NO_NUMBER = Flag(name="lr", values=("much",), source="A_ARGS in f:3")


def ask(
    folder: Path, *flags: Flag, python: str = sys.executable, in_container: bool = False, ranks: int = 1
) -> ParserAnswer:
    environment = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    return ask_parser(
        Checkout.open(folder),
        flags,
        python=python,
        in_container=in_container,
        program="pretrain_gpt.py",
        environment=environment,
    )


def test_an_unknown_flag_is_refused_with_the_checkouts_version_and_the_nearest(tmp_path: Path) -> None:
    stand_in(tmp_path / "c")
    found = ask(tmp_path / "c", GOOD, UNKNOWN, NO_NUMBER)
    assert found.certain
    first, second = found.refusals
    assert first.words == "this checkout (swiss-ai) has no flag --num-layerz; did you mean '--num-layers'?"
    assert first.source == "megatron_lm.args"
    assert second.words == "this checkout (swiss-ai) says: argument --lr: invalid float value: 'much'"
    assert second.source == "A_ARGS in f:3"
    assert ask(tmp_path / "c", GOOD).refusals == []


def test_the_programs_own_arguments_count(tmp_path: Path) -> None:
    stand_in(tmp_path / "c")
    program = tmp_path / "c" / "pretrain_gpt.py"
    program.write_text("def extra(parser):\n    parser.add_argument('--num-layerz', type=int)\n    return parser\n")
    assert ask(tmp_path / "c", UNKNOWN).refusals == []


@pytest.mark.parametrize(
    ("imports", "python", "in_container", "why"),
    [
        ("import no_such_module", sys.executable, False, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os; os._exit(3)", sys.executable, False, "exit code 3"),
        ("raise SystemExit('no GPU')", sys.executable, False, "no GPU"),
        ("print('x' * 100000)", "/no/python", False, "/no/python: No such file or directory"),
        ("", sys.executable, True, "the ranks' Python lies in a container"),
    ],
)
def test_where_it_cannot_be_asked_its_text_tells(
    tmp_path: Path, imports: str, python: str, in_container: bool, why: str
) -> None:
    stand_in(tmp_path / "c", imports=imports)
    found = ask(tmp_path / "c", GOOD, UNKNOWN, NO_NUMBER, python=python, in_container=in_container)
    assert not found.certain
    assert found.unavailable == why
    assert [each.words for each in found.refusals] == [
        "this checkout (swiss-ai) has no flag --num-layerz; did you mean '--num-layers'?"
    ]


def test_nothing_runs_behind_the_parser(tmp_path: Path) -> None:
    """And what a checkout prints at import does not get between."""
    stand_in(tmp_path / "c", imports="import sys; print('hi'); sys.stdout.flush()")
    arguments = tmp_path / "c/megatron/training/arguments.py"
    arguments.write_text(arguments.read_text().replace("raise SystemExit(", f"open('{tmp_path}/ran', 'w'); raise ("))
    assert ask(tmp_path / "c", GOOD).certain
    assert not (tmp_path / "ran").exists()


VALIDATION = """
import os

def validate_args(args, defaults):
    assert int(os.environ["RANK"]) == 0
    assert int(os.environ["WORLD_SIZE"]) % int(args.num_layers) == 0, "num_layers 2 do not divide the ranks"
    if args.lr == 5:
        import a_package_of_the_ranks
    if args.lr == 6:
        raise RuntimeError("Found no NVIDIA driver on your system.")

def core_transformer_config_from_args(args):
    if args.lr > 7 and getattr(args, "apply_rope_fusion", True):
        args.apply_rope_fusion = True
        raise ValueError("apply_rope_fusion is not available. Please install TE >= 1.4 or Apex.")
    if args.lr in (7, 8):
        raise ValueError("Only one activation function can be selected at a time")
"""


def test_the_checkouts_validation_judges_with_the_ranks_of_the_run(tmp_path: Path) -> None:
    """Errors of a machine without a GPU, or without a package of the ranks, say nothing of the flags."""
    stand_in(tmp_path / "c")
    arguments = tmp_path / "c/megatron/training/arguments.py"
    arguments.write_text(arguments.read_text().replace("    raise SystemExit(", "    return args\n    (") + VALIDATION)

    def said(lr: str, ranks: int = 4) -> list[tuple[str, str]]:
        flag = Flag(name="lr", values=(lr,), source="optimizer.lr")
        return [(each.words, each.source) for each in ask(tmp_path / "c", GOOD, flag, ranks=ranks).refusals]

    assert said("1") == said("5") == said("6") == []
    answers = [
        ask(tmp_path / "c", GOOD, Flag(name="lr", values=(lr,), source=""), ranks=4).unjudged for lr in ("5", "6")
    ]
    assert "No module named 'a_package_of_the_ranks'" in str(answers[0])
    assert "Found no NVIDIA driver" in str(answers[1])
    ((words, source),) = said("1", ranks=3)
    assert "refuses these flags together: AssertionError: num_layers 2 do not divide the ranks (arguments.py:" in words
    assert source == "model.num_layers"
    for lr in ("7", "8"):  # the other rules are asked without a fused kernel that this machine lacks
        ((words, _),) = said(lr)
        assert "ValueError: Only one activation function can be selected at a time" in words
    taken = ask(tmp_path / "c", GOOD, Flag(name="lr", values=("9",), source=""), ranks=4)
    assert (taken.refusals, taken.unjudged, [*taken.lacking]) == ([], None, ["apply_rope_fusion"])


def test_a_dataclass_becomes_flags(tmp_path: Path) -> None:
    """As in NVIDIA's checkouts since 2025."""
    stand_in(tmp_path / "c")
    training = tmp_path / "c/megatron/training"
    (training / "training_config.py").write_text(
        "class Base:\n    base_steps: int = 1\n"
        "class TrainingConfig(Base):\n"
        "    new_iters: int | None = None\n"
        "    manual_gc_eval: bool = True\n"
        "    profiler: bool = field(default=False, metadata={'argparse_meta': {'arg_names': ['--prof', '--nsys']}})\n"
        "    def other(self): ...\n"
    )
    arguments = training / "arguments.py"
    arguments.write_text(arguments.read_text() + "\ndef _add():\n    ArgumentGroupFactory(TrainingConfig)\n")
    flags = Checkout.open(tmp_path / "c").flags
    assert {"base-steps", "new-iters", "no-manual-gc-eval", "disable-manual-gc-eval", "prof", "nsys"} <= flags
    assert not {"manual-gc-eval", "profiler", "other"} & flags


CHECKOUTS = [
    each for each in os.environ.get("MEGATRON_CHECKOUTS", os.environ.get("MEGATRON_LM_DIR", "")).split(":") if each
]


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_CHECKOUTS=A:B, or MEGATRON_LM_DIR, names no checkout")
@pytest.mark.parametrize("folder", CHECKOUTS)
def test_a_real_checkout(folder: str) -> None:
    """It names all flags that settings become; and where it can be imported, its parser has what its text has."""
    checkout = Checkout.open(folder)
    wanted = {row.flag for row in FLAG_TABLE} | {name for name, *_ in FIXED_FLAGS}
    newer = {"recompute-modules", "cross-entropy-fusion-impl"}  # than megatron-core 0.11
    one_fork = {"log-params-norm-per-param"}  # swiss-ai's own
    assert wanted - newer - one_fork <= checkout.flags
    found = ask(Path(folder), GOOD, UNKNOWN, NO_NUMBER)
    words = [each.words for each in found.refusals]
    assert words[0].startswith(
        f"this checkout ({checkout.version}) has no flag --num-layerz; did you mean '--num-layers'"
    )
    if found.certain:
        assert words[1:] == [f"this checkout ({checkout.version}) says: argument --lr: invalid float value: 'much'"]


def test_words_are_grouped_by_their_flags() -> None:
    assert parse_flags.group_words(["--a", "1", "--b=2", "--c", "-1", "x"]) == [
        ["--a", "1"],
        ["--b=2"],
        ["--c", "-1", "x"],
    ]
