"""A checkout of Megatron-LM: whether it is there, with its program."""

from __future__ import annotations

from pathlib import Path

from relayrun.config.schema import MegatronConfig
from relayrun.submit.check.finding import Findings


def look(config: MegatronConfig, findings: Findings) -> None:
    """Look at the checkout's folder, its program and its arguments, and at the file of further flags."""
    own = config.megatron_lm
    folder = Path(own.dir)
    if not folder.is_dir():
        findings.refuse(
            "megatron_lm.dir",
            "there is no such folder",
            setting="megatron_lm.dir",
            remedy="set it, or MEGATRON_LM_DIR in the launcher, to a checkout of Megatron-LM",
        )
        return
    if not (folder / "megatron" / "training" / "arguments.py").is_file():
        findings.refuse(
            "megatron_lm.dir",
            "this is no checkout of Megatron-LM: it has no megatron/training/arguments.py",
            setting="megatron_lm.dir",
        )
    if not (folder / own.program).is_file():
        programs = ", ".join(sorted(path.name for path in folder.glob("pretrain_*.py")))
        findings.refuse(
            "megatron_lm.program",
            f"{folder} has no {own.program}",
            setting="megatron_lm.program",
            remedy=f"it has {programs}" if programs else None,
        )
    if own.args_file is not None and not Path(own.args_file).is_file():
        findings.refuse("megatron_lm.args_file", "there is no such file", setting="megatron_lm.args_file")
