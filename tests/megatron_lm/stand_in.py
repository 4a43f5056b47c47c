"""A folder that looks like a checkout of Megatron-LM to relayrun: its parser takes flags, and nothing else is there.

Its arguments are those that the launchers' runs have. What real checkouts take is seen by the tests that need one.
"""

from __future__ import annotations

from pathlib import Path

from relayrun.config.compose.megatron_flags import FIXED_FLAGS, FLAG_TABLE

OTHERS = (
    "use-precision-aware-optimizer main-grads-dtype cross-entropy-loss-fusion no-check-for-nan-in-loss-and-grad "
    "dataloader-type num-workers num-dataset-builder-threads no-log-loss-scale-to-tensorboard "
    "log-memory-to-tensorboard defer-embedding-wgrad-compute wgrad-deferral-limit "
    "overlap-p2p-communication-warmup-flush no-rope-fusion disable-gloo-process-groups fp16 finetune no-load-optim "
    "data-path train-data-path valid-data-path data-args-path per-split-data-args-path save load ckpt-step "
    "tensorboard-dir profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler "
    "wandb-project wandb-exp-name wandb-save-dir"
)
TYPES = {"num-layers": "int", "lr": "float"}

HEAD = """import argparse


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description="stand-in", allow_abbrev=False)
"""
TAIL = """
    args = parser.parse_args()
    raise SystemExit("nobody may come as far as here: behind it a checkout asks for GPUs")
"""


def stand_in(folder: Path, *, dialect: str = "swiss-ai", imports: str = "") -> Path:
    """Write one, and return its folder. `imports`: what stands before everything else in its arguments."""
    names = {*OTHERS.split(), *(row.flag for row in FLAG_TABLE), *(name for name, *_ in FIXED_FLAGS)}
    names.add("trigger-path" if dialect == "swiss-ai" else "exit-signal")
    lines = [
        f"    parser.add_argument('--{name}', " + (f"type={TYPES[name]})" if name in TYPES else "nargs='*')")
        for name in sorted(names)
    ]
    style = "1-sqrt" if dialect == "swiss-ai" else "minus_sqrt"
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "arguments.py").write_text(f"{imports}\n# {style}\n{HEAD}" + "\n".join(lines) + TAIL)
    (folder / "pretrain_gpt.py").write_text("raise SystemExit('a stand-in does not train')\n")
    return folder
