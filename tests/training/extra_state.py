"""Run by test_training_extra_state.py in a process of its own, since the device shim changes torch.

TransformerEngine needs a GPU. What its modules add to a checkpoint is one object each, `_extra_state`; a norm that has
it, and wants it, stands in for them. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

from relayrun.config.compose import yaml_file  # noqa: E402
from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.checkpoint import megatron_strategy  # noqa: E402
from relayrun.train.checkpoint.megatron_strategy import InProcessStrategy  # noqa: E402
from relayrun.train.checkpoint.reader import CheckedReader  # noqa: E402
from relayrun.train.messages import RankObjectCollectives  # noqa: E402
from relayrun.train.model import cpu_patches, layers  # noqa: E402
from relayrun.train.model.gpt import ModelStage  # noqa: E402
from relayrun.train.model.layers import Norm, NormWithExtraState  # noqa: E402

VOCABULARY = 300


class EngineNorm(Norm):
    """A norm with TransformerEngine's state: bytes, or None before fp8 was used; torch asks for it in a strict load."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.given: list[object] = []

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        assert state is None or (isinstance(state, torch.Tensor) and state.dtype == torch.uint8)
        self.given.append(state)


def model(final: type[Norm], inner: type[Norm] = Norm) -> ModelStage:
    """A model with these norms, its weights drawn anew."""
    layers.NormWithExtraState, layers.Norm = final, inner  # type: ignore[attr-defined,misc,assignment]
    return ModelStage(config, ranks, VOCABULARY)


def save(made: ModelStage, name: str) -> Path:
    folder = target / name
    folder.mkdir()
    wanted = {"model": made.sharded_state_dict({})}
    dist_checkpointing.save(wanted, str(folder), InProcessStrategy(RankObjectCollectives(ranks.cpu_group, tag=1)))
    return folder


def ours(made: ModelStage, folder: Path) -> None:
    made.load(
        megatron_strategy.load_state({"model": made.sharded_state_dict({})}, CheckedReader(folder, None))["model"]
    )


def megatrons(made: ModelStage, folder: Path) -> None:
    """As a program does it that knows nothing of relayrun: strictly."""
    made.load(dist_checkpointing.load({"model": made.sharded_state_dict({})}, str(folder))["model"])


def weights(made: ModelStage) -> list[str]:
    return [parameter.detach().numpy().tobytes().hex() for _, parameter in sorted(made.chunks[0].named_parameters())]


def loaded(load: Callable[[ModelStage, Path], None], into: ModelStage, folder: Path, wanted: list[str] | None) -> str:
    try:
        load(into, folder)
    except BaseException as error:  # torch's own is no Exception
        return f"{type(error).__name__}"
    return "same" if wanted is None or weights(into) == wanted else "other"


cpu_patches.patch_for_cpu()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
target, imported = Path(sys.argv[1]), Path(sys.argv[2])
config = RunConfig.model_validate(
    {
        "project": "tests",
        "name": "state",
        "model": yaml_file.read_yaml(imported / "model.yaml").values["model"],
        "data": {"tokenizer": "none", "datasets": ["none"]},
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 16, "threads": 1},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"interval": 10},
        "job": {"time": "10"},
        "cluster": {"name": "test", "scheduler": "local"},
    }
)
ranks = distributed.start_process_groups(config)

local = model(NormWithExtraState)
now = save(local, "now")
old = model(Norm)  # before this version the norm had no state
earlier = save(old, "earlier")
engine = model(EngineNorm)
engines = save(engine, "engines")
more = model(EngineNorm, EngineNorm)  # as with a norm of queries and keys: state that no local module writes
result: dict[str, Any] = {
    "earlier, as before": loaded(megatrons, model(EngineNorm), earlier, weights(old)),
    "earlier": loaded(ours, model(EngineNorm), earlier, weights(old)),
    "earlier, local": loaded(ours, model(NormWithExtraState), earlier, weights(old)),
    "now": loaded(ours, model(EngineNorm), now, weights(local)),
    "now, by another program": loaded(megatrons, model(EngineNorm), now, weights(local)),
    "now, more state": loaded(ours, model(EngineNorm, EngineNorm), now, weights(local)),
    "imported": loaded(ours, model(EngineNorm), imported, None),
    "imported, by another program": loaded(megatrons, model(EngineNorm), imported, None),
    "engine's, local": loaded(ours, model(NormWithExtraState), engines, weights(engine)),
}
asked = model(EngineNorm)
ours(asked, now)
norm = asked.chunks[0].module.decoder.final_layernorm
result["given"] = [None if state is None else list(state.shape) for state in norm.given]
print(json.dumps(result))
sys.stdout.flush()
os._exit(0)
