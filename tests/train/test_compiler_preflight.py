"""Kernels that torch compiles on first use, on nodes without a compiler."""

from __future__ import annotations

import logging
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from relayrun.errors import FatalTrainingError  # noqa: E402
from relayrun.train.model import attention, kernels  # noqa: E402
from tests import warm  # noqa: E402


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a node whose PATH and headers are empty folders."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name == "triton" or None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "include")})
    return tmp_path


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


NO_COMPILER = "no C compiler (CC, gcc or clang)"


def test_the_compiler_is_looked_for_as_triton_does(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._missing_compiler() == NO_COMPILER
    program(node / "bin/cc")  # triton does not know it
    assert kernels._missing_compiler() == NO_COMPILER
    program(node / "bin/clang")
    assert kernels._missing_compiler() == f"no Python.h in {node / 'include'}"
    (node / "include/Python.h").touch()
    assert kernels._missing_compiler() is None
    monkeypatch.setenv("CC", str(node / "missing"))
    assert kernels._missing_compiler() == NO_COMPILER
    monkeypatch.setenv("CC", program(node / "my-cc"))
    (node / "bin/clang").unlink()
    assert kernels._missing_compiler() is None


def ranks(rank: int, others: list[str | None], device: str = "cuda") -> Any:
    """This rank among others, of which each finds or lacks a compiler."""
    return SimpleNamespace(rank=rank, device=torch.device(device), gather=lambda own: [own, *others])


def config(*, loss: bool = False, permute: bool = False) -> Any:
    transformer = SimpleNamespace(moe_permute_fusion=permute)
    return SimpleNamespace(
        training=SimpleNamespace(cross_entropy_loss_fusion=loss), model=SimpleNamespace(transformer=transformer)
    )


def test_without_a_compiler_on_any_node_all_run_uncompiled(
    node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    with caplog.at_level(logging.WARNING):
        kernels.check_compiler(config(), ranks(0, [None]))
        kernels.check_compiler(config(), ranks(1, [None]))
    assert stances == 2 * ["force_eager"]
    assert caplog.messages == [f"torch.compile is off, and steps are slower: rank 0 finds {NO_COMPILER}"]
    kernels.check_compiler(config(), ranks(0, [None], device="cpu"))
    for asked in (config(loss=True), config(permute=True)):
        with pytest.raises(FatalTrainingError) as caught:
            kernels.check_compiler(asked, ranks(0, [None]))
        assert f"is set and cannot be had: rank 0 finds {NO_COMPILER}" in caught.value.message
    program(node / "bin/gcc")
    (node / "include/Python.h").touch()
    kernels.check_compiler(config(loss=True), ranks(0, [None]))
    assert stances == 2 * ["force_eager"]
    kernels.check_compiler(config(), ranks(0, [None, "no Python.h in /usr"]))
    assert stances == 3 * ["force_eager"]


@pytest.mark.slow
def test_functions_that_are_compiled_already_run_uncompiled() -> None:
    """megatron-core decorates them when it is imported. Without c++ the compiler of torch for CPUs fails."""
    text = """
import torch
from megatron.core.fusions.fused_bias_swiglu import swiglu
x = torch.arange(8.0)
try:
    swiglu(x)
    print("compiled")
except Exception as error:
    print(type(error).__name__)
torch.compiler.set_stance("force_eager")
print(torch.equal(swiglu(x), torch.nn.functional.silu(x[:4]) * x[4:]))
"""
    environment = {"PATH": "/nowhere", "CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": "/nowhere"}
    done = warm.run([sys.executable, "-c", text], env=environment)
    first, second = done.stdout.split()
    assert (first != "compiled", second) == (True, "True"), done.stderr


def test_the_kernel_of_attention_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attention._log_kernel.cache_clear()
    with caplog.at_level(logging.INFO):
        for name in ("varlen_attn", "FLASH_ATTENTION of scaled_dot_product_attention", "varlen_attn"):
            attention._log_kernel(name)
    assert caplog.messages == ["attention: varlen_attn", "attention: FLASH_ATTENTION of scaled_dot_product_attention"]
    attention._log_kernel.cache_clear()


def test_rank_0_logs_the_allocator_and_the_communicators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segments = [{"is_expandable": False}, {"is_expandable": True}]
    bound = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    world = SimpleNamespace(pg_map={"world": 0, "tensor": 0, "cpu": 0}, default_pg=bound)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo" if group == "cpu" else "nccl")
    with caplog.at_level(logging.INFO):
        for rank in range(2):
            kernels.log_gpu_state(ranks(rank, []))
    assert caplog.messages == [
        "GPU memory is in expandable segments; this rank has 2 NCCL groups, whose communicators are made at the start"
    ]
