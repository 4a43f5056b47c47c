"""Runs a program of a Megatron-LM checkout (pretrain_gpt.py) on CPUs over gloo, unchanged. For tests alone.

    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29777 python on_cpu.py pretrain_gpt.py ARGS

It puts CPU stand-ins in place of torch's CUDA names, and tells torch's newer checkpoint writer what older forks ask of
it. `MEGATRON_ON_CPU_SLOW=12:3`: behind twelve iterations each takes three seconds; `MEGATRON_ON_CPU_FAIL=5`: the
sixth iteration of a program raises. `MEGATRON_ON_CPU_SORTED_GROUPS=1`: the optimizer's groups of parameters have one
order on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing.spawn
import os
import runpy
import sys
import time
import types
from typing import Any

import numpy
import torch
import torch.cuda.random
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as filesystem
import torch.utils.data
from torch.utils import cpp_extension

CPU = torch.device("cpu")


def nothing() -> Any:
    """A new function that does nothing: dynamo refuses one object under two names."""
    return lambda *args, **kwargs: None


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = synchronize = wait = nothing()

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = synchronize = wait_event = nothing()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Generator:
    def set_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def get_state(self) -> torch.Tensor:
        return torch.get_rng_state()


class Generators(dict[int, Generator]):
    def __getitem__(self, key: int) -> Generator:
        return Generator()


def is_cuda(value: object) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def install_cuda() -> None:
    """Put stand-ins in place of what Megatron-LM asks CUDA for."""
    cuda: Any = torch.cuda
    cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]  # type: ignore[attr-defined]
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
    memory = dict.fromkeys((*names, "reserved_bytes.all.peak", "allocation.all.current"), 0)
    device = types.SimpleNamespace(major=8, minor=0, name="cpu", total_memory=1 << 34)
    stand_ins = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: CPU,
        "set_device": nothing(),
        "synchronize": nothing(),
        "empty_cache": nothing(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "reset_peak_memory_stats": nothing(),
        "get_device_properties": lambda *a: device,
        "get_device_capability": lambda *a: (8, 0),
        "get_device_name": lambda *a: "CPU",
        "memory_stats": lambda *a: memory,
        "current_stream": lambda *a: Stream(),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "default_generators": Generators(),
        "_lazy_init": nothing(),
        "_lazy_call": lambda call, **k: call(),
    }
    for name, value in stand_ins.items():
        setattr(cuda, name, value)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *a, **k: 0)
    random: Any = torch.cuda.random
    random.get_rng_state, random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = lambda: 0
    accelerator.is_available = lambda *a, **k: False


def install_tensors() -> None:
    """Have tensors that are to be made on, or moved to, CUDA stay on the CPU."""
    made = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "as_tensor", "eye")
    for name in (*made, "zeros_like", "ones_like", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *a, **k: self
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[assignment,misc]
    original_to, original_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *("cpu" if is_cuda(value) else value for value in args), **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:  # gradient clipping asks for CUDA's names
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        return original_type(self, dtype, non_blocking, **kwargs)

    tensor.to, tensor.type = to, type_


def install_gloo() -> None:
    """Have every group of processes talk over gloo."""
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init(backend: object = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init_process_group("gloo", *args, **kwargs)

    def group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        return new_group(*args, **kwargs | {"backend": "gloo"})

    dist.init_process_group, dist.new_group = init, group


def install_batches() -> None:
    """Read batches in this process; go slowly, or fail, where the environment says so."""
    original = torch.utils.data.DataLoader.__init__

    def loader(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs | {"pin_memory": False, "num_workers": 0, "persistent_workers": False})

    torch.utils.data.DataLoader.__init__ = loader  # type: ignore[method-assign]
    after, _, seconds = os.environ.get("MEGATRON_ON_CPU_SLOW", "").partition(":")
    fail = os.environ.get("MEGATRON_ON_CPU_FAIL")
    batches: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    original_next = batches.__next__
    given = 0

    def following(self: Any) -> Any:
        nonlocal given
        if fail is not None and given >= int(fail):
            raise RuntimeError("the test wants this program to fail")
        if seconds and given >= int(after):
            time.sleep(float(seconds))
        given += 1
        return original_next(self)

    batches.__next__ = following


def sort_groups() -> None:
    """Those with weight decay first, as on the stage with the embedding. From core 0.11, for a comparison."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    groups = optimizer._get_param_groups
    optimizer._get_param_groups = lambda *a, **k: sorted(groups(*a, **k), key=lambda group: -group["wd_mult"])


def install_saves() -> None:
    """Let older forks write checkpoints with this torch, and have helpers not import the whole program again."""
    if not hasattr(numpy, "product"):  # numpy 2; older forks ask for it
        numpy.product = numpy.prod  # type: ignore[attr-defined]
    prepare = multiprocessing.spawn.get_preparation_data

    def preparation(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = preparation
    module: Any = filesystem
    write_item = module._write_item
    if "transforms" not in inspect.signature(write_item).parameters:
        return

    @functools.wraps(write_item)  # newer forks look at the signature; megatron-core before 0.12 knows four arguments
    def write_item_of_old(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs:
            args = (module._StorageWriterTransforms(), *args, module.SerializationFormat.TORCH_SAVE)
        return write_item(*args, **kwargs)

    module._write_item = write_item_of_old


if __name__ == "__main__":
    install_cuda()
    install_tensors()
    install_gloo()
    install_batches()
    install_saves()
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    if os.environ.get("MEGATRON_ON_CPU_SORTED_GROUPS"):
        sort_groups()
    runpy.run_path(program, run_name="__main__")
