"""What every Python of a Megatron-LM on CPUs needs, spawned ones too: it stands on PYTHONPATH.

NVIDIA's imports a module whose kernels need triton, which CPU builds of torch lack. And helpers that a rank spawns
(the manager of its save's queue) hear no signal that is meant for the rank: on clusters with proctrack/cgroup Slurm
signals tasks alone, with the proctrack/linuxproc of the test cluster whatever descends from them.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import signal
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == NAME else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.enable_batch_invariant_mode = module.is_batch_invariant_mode_enabled = lambda *a, **k: False  # type: ignore[attr-defined]


sys.meta_path.insert(0, Finder())
if any("multiprocessing.spawn" in word or "resource_tracker" in word for word in sys.orig_argv):
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
