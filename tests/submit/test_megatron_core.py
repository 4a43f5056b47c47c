"""Which versions of megatron-core are taken, and each difference between them, in both of its forms."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from relayrun.config.compose import resolve
from relayrun.errors import FatalTrainingError
from relayrun.submit.check import programs
from relayrun.submit.check.findings import Findings
from relayrun.train import megatron_versions
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pretend("0.19.2", triton=True)`: what an import would find. None: no megatron-core at all."""
    find = importlib.util.find_spec

    def install(version: str | None, *, triton: bool = False, text: str | None = None) -> None:
        folder = tmp_path / "megatron/core"
        folder.mkdir(parents=True, exist_ok=True)
        if version is not None:
            major, minor, patch = version.split(".")
            text = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = 'rc1'\n"
        if text is not None:
            (folder / "package_info.py").write_text(text)

        def answer(name: str) -> Any:
            if name == "megatron.core":
                if version is None and text is None:
                    raise ModuleNotFoundError("No module named 'megatron'")
                spec = importlib.machinery.ModuleSpec(name, None)
                spec.submodule_search_locations = [str(folder)]
                return spec
            if name == "triton":
                return importlib.machinery.ModuleSpec(name, None) if triton else None
            return find(name)

        monkeypatch.setattr(importlib.util, "find_spec", answer)

    return install


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.17.1", "0.18.2"])
def test_versions_that_are_supported(pretend: Any, version: str) -> None:
    pretend(version)
    assert megatron_versions.installed_version() == tuple(map(int, version.split(".")))
    megatron_versions.check_version()


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0.0"])
def test_versions_that_are_not_are_refused_with_those_that_are(pretend: Any, version: str) -> None:
    pretend(version)
    with pytest.raises(FatalTrainingError) as refused:
        megatron_versions.check_version()
    assert f"megatron-core {version} is not supported: relayrun runs with 0.16 to 0.19" in str(refused.value)
    assert "pip install 'relayrun[train]'" in str(refused.value)


def test_triton_is_asked_for_where_it_is_imported(pretend: Any) -> None:
    pretend("0.19.2", triton=True)
    megatron_versions.check_version()
    pretend("0.19.2", triton=False)
    with pytest.raises(FatalTrainingError, match="imports triton, which is not installed"):
        megatron_versions.check_version()


@pytest.mark.parametrize("text", [None, "", "MAJOR = 0\n", "MAJOR = 0\nMINOR = 99\n"])
def test_a_version_that_cannot_be_told_passes(pretend: Any, text: str | None) -> None:
    pretend(None, text=text)
    assert megatron_versions.installed_version() is None
    megatron_versions.check_version()


def test_the_check_before_the_queue_says_it(pretend: Any, tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path / "workspace")
    pretend("0.20.0")

    def errors(**cluster: Any) -> list[str]:
        config = resolve.load_run_config(workspace.config("run", cluster={"python": None} | cluster))
        findings = Findings(config)
        programs.check_programs(config, findings)
        return [error.words for error in findings.errors if error.name == "node.megatron_core"]

    assert errors() == ["megatron-core 0.20.0 is not supported: relayrun runs with 0.16 to 0.19"]
    assert errors(environment={"PYTHONPATH": str(tmp_path)}) == [], "the ranks import from elsewhere"
    pretend("0.16.1")
    assert errors() == []


def test_what_pip_installs_is_supported() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    wanted = [found for text in extra if (found := Requirement(text)).name in ("megatron-core", "triton")]
    for python, minor in (("3.11", 16), ("3.12", 19)):
        known = {"python_version": python, "extra": ""}
        (core,) = [
            each for each in wanted if each.name == "megatron-core" and each.marker and each.marker.evaluate(known)
        ]
        assert str(core.specifier).startswith(f"==0.{minor}.")
        assert megatron_versions.FIRST <= (0, minor) < megatron_versions.BEHIND
        triton = [each for each in wanted if each.name == "triton" and each.marker and each.marker.evaluate(known)]
        assert bool(triton) == ((0, minor) >= megatron_versions.TRITON)


def test_the_norms_gradients_have_another_name_since_0_19() -> None:
    assert megatron_versions.gradients_for_norm(SimpleNamespace(get_main_grads_for_grad_norm=lambda: [1])) == [1]
    assert megatron_versions.gradients_for_norm(SimpleNamespace(get_grads_for_grad_norm=lambda: [2])) == [2]


def test_a_batch_is_divided_with_a_word_on_hybrid_groups_since_0_18(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(batch: Any, cp_group: Any = None) -> Any:
        return batch | {"by": "before", "over": cp_group}

    def since(batch: Any, is_hybrid_cp: bool, cp_group: Any = None) -> Any:
        return batch | {"by": is_hybrid_cp, "over": cp_group}

    for function, by in ((before, "before"), (since, False)):
        module = ModuleType("megatron.core.utils")
        module.get_batch_on_this_cp_rank = function  # type: ignore[attr-defined]
        for name in ("megatron", "megatron.core"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "megatron.core.utils", module)
        state = ModuleType("megatron.core.parallel_state")
        state.get_context_parallel_group = lambda: "context"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
        found = megatron_versions.batch_of_context_rank({"labels": 1})
        assert found == {"labels": 1, "by": by, "over": "context"}  # 0.19 divides over all ranks without a group


@dataclass
class Spec:
    """As megatron-core's ModuleSpec."""

    module: type
    submodules: Any = None


class Base:
    """As MLP."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    @classmethod
    def as_mlp_submodule(cls, **given: Any) -> Base:
        return cls(**given)


class Own(Base):
    """A class of ours."""


def test_a_feed_forward_layer_is_a_partial_since_0_18() -> None:
    assert megatron_versions.with_feed_forward(Spec(Base, "parts"), Own) == Spec(Own, "parts")
    made = megatron_versions.with_feed_forward(functools.partial(Base.as_mlp_submodule, submodules="parts"), Own)(
        config=1
    )
    assert type(made) is Own
    assert made.given == {"submodules": "parts", "config": 1}


def test_experts_are_a_partial_since_0_17_and_the_layer_around_them_since_0_18() -> None:
    def around(experts: Any) -> Any:
        return SimpleNamespace(experts=experts)

    oldest = megatron_versions.with_experts(Spec(Base, around(Spec(Base, "parts"))), Own)
    assert oldest.submodules.experts == Spec(Own, "parts")
    for form in (
        Spec(Base, around(functools.partial(Base, submodules="parts"))),
        functools.partial(Base, submodules=around(functools.partial(Base, submodules="parts"))),
    ):
        found = megatron_versions.with_experts(form, Own)
        inside = found.keywords["submodules"] if isinstance(found, functools.partial) else found.submodules
        made = inside.experts(config=1)
        assert type(made) is Own
        assert made.given == {"submodules": "parts", "config": 1}
