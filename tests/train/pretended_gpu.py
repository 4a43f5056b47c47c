"""`pretended_gpu.py [nvml | mig | asks | none]`: the imports of the server that forks ranks, where torch sees a GPU.

Prints what CUDA was asked for, as JSON, and what the server says of it.

`nvml`: NVIDIA's library says that there is one. `mig`: it does not, as for a slice of one, and a package asks whether
there is CUDA. `asks`: a package asks for the device's properties. `none`: torch is built for CUDA, and neither its
driver nor a GPU is here; a package asks whether there is CUDA. CUDA is a stand-in; what asks it for something leaves
it to no fork, as torch has it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from relayrun.control.agent.node_agent import FORK_SERVER_ENVIRONMENT
from relayrun.train import __main__ as program
from relayrun.train import fork_server

asked: list[str] = []
SERVER = os.getpid()


def notes(name: str, value: Any) -> Callable[..., Any]:
    def note(*_: object) -> Any:
        asked.append(name)
        return value

    return note


if __name__ == "__main__":
    kind = sys.argv[1]
    os.environ |= FORK_SERVER_ENVIRONMENT
    devices = int(kind != "none")
    for name, value in {"_cuda_getDeviceCount": devices, "_cuda_init": None, "_cuda_getCurrentRawStream": 0}.items():
        setattr(torch._C, name, notes(name, value))
    cuda: Any = torch.cuda
    cuda._lazy_init = notes("_lazy_init", None)
    cuda._get_device_properties = notes("_get_device_properties", None)
    cuda._device_count_nvml = lambda: -1 if kind in ("mig", "none") else 1
    cuda._is_in_bad_fork = lambda: bool(asked) and os.getpid() != SERVER
    if kind != "nvml":  # a package that is quicker
        program.import_program_modules = {"asks": lambda: cuda.get_device_properties(0)}.get(kind, cuda.is_available)
    words = ""
    try:
        fork_server.import_program()
    except RuntimeError as error:
        words = str(error)
    print(json.dumps({"asked": asked, "words": words, "megatron": "megatron.core" in sys.modules}))
