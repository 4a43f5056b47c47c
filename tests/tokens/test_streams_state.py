"""What a checkpoint keeps of streams, damaged: it is refused, so that no lane begins anew without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import FatalTrainingError
from tests.streaming import sampler, stream, write

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("streams"),
        lambda state: state["streams"].pop("web"),
        lambda state: state.update(streams=[]),
        lambda state: state["streams"].update(web=[]),
        lambda state: state["streams"]["web"].pop("cursors"),
        lambda state: state["streams"]["web"].pop("at"),
        lambda state: state["streams"]["web"].update(at=9),
        lambda state: state["streams"]["web"]["cursors"].__setitem__(0, None),
        lambda state: state["streams"]["web"]["cursors"].__setitem__(0, []),
        lambda state: state["streams"]["web"]["cursors"][0].__setitem__(0, 1.0),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, change: Change) -> None:
    write(tmp_path, "jsonl", [40])
    made = sampler({"web": stream(tmp_path, "jsonl")}, {"web": 1.0})
    reading = made.lane_reader(0, 0, 1)
    for k in range(8):
        reading.row(k)
    state = json.loads(json.dumps(made.state(8, [reading.cursors(8)])))
    reading.close()
    assert made.resume(state) == 8
    change(state)
    with pytest.raises(
        FatalTrainingError, match=r"(lanes of data set 'web' in|data state of) the checkpoint (are|is) damaged"
    ):
        made.resume(state)
