"""The site of a drill, and the run configs of its tests: a tiny model, forty steps, a save every ten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.lab.faults.table import Fault
from relayrun.lab.gpucheck.runs import random_data

RUN_STEPS = 40
SAVE_INTERVAL = 10
"""Iterations between two saves; `actions` relies on it."""
UNDISTURBED_RUN = "undisturbed"
"""Name of the run without a fault."""
INJECTION_HOOK = "relayrun.lab.faults.injection:FaultInjection"
VOCABULARY = 300
TINY_MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.1,  # so that random number generators matter
    "attention_dropout": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class DrillSite:
    """A cluster, and a folder on a file system of all its nodes."""

    folder: Path
    """Contains `runs`, `configs`, `commands` and `data`."""
    cluster: Mapping[str, Any]
    """Section `cluster` of the run configs: the site's file."""
    nodes: int = 2
    minutes: int = 10
    """Time limit of a job."""
    step_seconds: float = 1.0
    """Minimum duration of a step, so that a fault reaches the nodes while training runs."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings of every run config, by section."""

    @property
    def job(self) -> dict[str, Any]:
        """The site's defaults of section `job`."""
        return dict(self.cluster.get("job", {}))

    @property
    def ranks(self) -> int:
        """Number of ranks of a job, with the ranks per node of the site's file."""
        return self.nodes * int(self.job.get("ntasks_per_node", 1))

    @property
    def gpus(self) -> int:
        """Number of GPUs per node that a job requests."""
        return int(self.job.get("gpus_per_node", 0))

    @property
    def host_python(self) -> str:
        """Python of the batch script."""
        return str(self.cluster.get("host_python", "python3"))

    def run(self, name: str) -> Run:
        """Return the run of a test, or the undisturbed run."""
        return Run(self.folder / "runs" / name)

    def commands(self, name: str) -> Path:
        """Return the folder of a test's wrappers and their marker."""
        return self.folder / "commands" / name

    def write_config(self, name: str, fault: Fault | None) -> Path:
        """Write the run config of a test, or of the undisturbed run (None); return its path."""
        path = self.folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml_file.dump_yaml(self.values(name, fault)), encoding="utf-8")
        return path

    def values(self, name: str, fault: Fault | None) -> dict[str, Any]:
        """Return the run config of a test as plain values."""
        inject = ",".join(filter(None, [f"step-delay={self.step_seconds}", fault.inject if fault else ""]))
        hooks = [{"hook": INJECTION_HOOK, "options": {"faults": inject}}]
        training: dict[str, Any] = {"steps": RUN_STEPS, "seq_length": 64, "hooks": hooks, "deterministic": True}
        training |= {"micro_batch_size": 2, "global_batch_size": 4 * self.ranks, "seed": 1}
        training |= {"precision": "bf16"} if self.gpus else {"precision": "fp32", "threads": 1}
        sections: dict[str, dict[str, Any]] = {
            "model": dict(TINY_MODEL),
            "training": training,
            "optimizer": {"lr": 1e-3, "lr_warmup_steps": 2},
            "checkpoint": {"interval": SAVE_INTERVAL},
            "chain": {"auto_requeue": True},
            "job": {"nodes": self.nodes, "time": str(self.minutes)},
            "data": random_data(self.folder / "data", vocabulary=VOCABULARY, longest=400, documents=120),
            "cluster": dict(self.cluster),
        }
        for changes in (self.changes, fault.config if fault else {}):
            for section, values in changes.items():
                sections[section] = sections.get(section, {}) | dict(values)
        if fault and "python3" in fault.commands:  # the wrapper is found by name on PATH
            sections["cluster"]["host_python"] = "python3"
        return {"project": "drill", "name": name, "run_dir": str(self.run(name).path), **sections}
