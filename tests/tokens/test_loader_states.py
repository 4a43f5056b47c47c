"""States of `relayrun.loader` in the situations of which torchdata's and Grain's own suites ask after an iterator's.

torchdata 0.11 (`test/stateful_dataloader`): a state before the first batch, after each one, at the end of an epoch; one
that is asked for again, or right behind a load; as JSON; two loaders at once; a second `iter`; other numbers of
workers; errors of the data. Grain 0.2.18: a checkpoint of every step, on a new object and on the same one, also back;
no drift over many of them; a state that later batches do not change; damaged ones, and those of other data.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.errors import ConfigError, RelayrunError
from relayrun.loader import Loader
from tests.tokens.test_loader import BATCH, LENGTH, shards, text
from tests.workspace import Workspace

COUNT = 30
"""Batches: more than two epochs of the smaller data set."""


@pytest.fixture(params=[shards, text], ids=["shards", "text"])
def data(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    workspace = Workspace.make(tmp_path)
    return shards(workspace, web=3, code=1) if request.param is shards else text(workspace)


def opened(data: dict[str, Any], state: Any = None) -> Loader:
    loader = Loader(data, seq_length=LENGTH, batch_size=BATCH)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def rows(loader: Loader) -> list[list[int]]:
    found: list[list[int]] = next(loader)["input_ids"].tolist()
    return found


def whole(data: dict[str, Any]) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
    """All batches, and the state before each."""
    batches, states = [], []
    with opened(data) as loader:
        for _ in range(COUNT):
            states.append(loader.state_dict())
            batches.append(rows(loader))
    return batches, states


def test_every_state_goes_on_with_the_batch_behind_it(data: dict[str, Any]) -> None:
    """The first one, and those of both sides of an epoch's end; on a new loader and on the same, forwards and back."""
    batches, states = whole(data)
    same, order = opened(data), random.Random(49).sample(range(COUNT - 1), 12)
    for k in [0, *order, 0]:
        same.load_state_dict(states[k])
        assert [rows(same), rows(same)] == batches[k : k + 2], k
    same.close()
    for k in [0, *order[:4]]:
        with opened(data, states[k]) as loader:
            assert [rows(loader), rows(loader)] == batches[k : k + 2], k


def test_many_resumes_do_not_drift(data: dict[str, Any]) -> None:
    """One batch, one state, one new loader, again and again, through JSON."""
    batches, states = whole(data)
    state = states[0]
    for k in range(COUNT - 1):
        with opened(data, json.loads(json.dumps(state))) as loader:
            assert rows(loader) == batches[k]
            state = loader.state_dict()
        assert state == states[k + 1]


def test_a_state_is_a_value(data: dict[str, Any]) -> None:
    """Asked for twice, right behind a load, and behind later batches, it is the same; a load leaves it as it is."""
    batches, states = whole(data)
    state = copy.deepcopy(states[7])
    with opened(data, state) as loader:
        assert loader.state_dict() == loader.state_dict() == states[7]
        assert rows(loader) == batches[7]
        later = loader.state_dict()
        kept = copy.deepcopy(later)
        rows(loader)
        assert later == kept == states[8]
    assert state == states[7]


def test_iter_close_and_another_loader_do_not_move_a_loader(data: dict[str, Any]) -> None:
    batches, states = whole(data)
    one, other = opened(data), opened(data, states[9])
    for k in range(4):
        assert next(iter(one))["input_ids"].tolist() == batches[k]
        assert rows(other) == batches[9 + k]
        if k == 1:
            one.close()  # the next batch opens it again
    assert (one.state_dict(), other.state_dict()) == (states[4], states[13])
    one.close()
    other.close()


def test_damaged_states_and_those_of_other_data_are_refused(data: dict[str, Any], tmp_path: Path) -> None:
    """With a reason, and before the loader moves."""
    batches, states = whole(data)
    loader = opened(data, states[3])
    damaged: list[Any] = [{}, {**states[5], "loader": 99}]
    names = [name for name in states[5] if name != "batch_size"]  # which may be another at a resume
    damaged += [{name: states[5][name] for name in states[5] if name != left_out} for left_out in names]
    others: list[Any] = ["x", None, []]
    damaged += [{**states[5], name: other} for name in names for other in others]
    (tmp_path / "other").mkdir()
    other = Workspace.make(tmp_path / "other")
    with opened(text(other) if "lanes" not in data else shards(other, web=1, code=1)) as of_others:
        rows(of_others)
        damaged.append(of_others.state_dict())
    for state in damaged:
        try:
            loader.load_state_dict(state)
        except RelayrunError:
            pass
        else:
            raise AssertionError(f"was taken: {json.dumps(state)[:300]}")
        assert loader.position == 3 * BATCH
    assert rows(loader) == batches[3]
    loader.close()


def test_an_error_of_the_data_leaves_the_state_of_the_last_batch(tmp_path: Path) -> None:
    """A torn file ends the loader; with the file as it was, the state goes on."""
    workspace = Workspace.make(tmp_path)
    given = text(workspace)
    batches, _ = whole(given)
    files = sorted(Path(given["mixture"]["web"]["path"]).iterdir())
    contents = [file.read_bytes() for file in files]
    loader, found = opened(given), []
    found.append(rows(loader))
    for file in files:
        file.unlink()
    with pytest.raises(RelayrunError, match="is missing"):
        found.extend(rows(loader) for _ in range(10_000))
    state = loader.state_dict()
    loader.close()
    assert loader.position == len(found) * BATCH
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert found[:COUNT] == batches[: len(found)]
    with opened(given) as undisturbed, opened(given, state) as again:
        for _ in found:
            rows(undisturbed)
        assert [rows(again), rows(again)] == [rows(undisturbed), rows(undisturbed)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [(0, 1), (1, 0)])
def test_torchdatas_loader_keeps_the_state_between_workers(
    data: dict[str, Any], workers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StatefulDataLoader`, if it is installed: its own state goes on with another number of workers or is refused."""
    stateful: Any = pytest.importorskip("torchdata.stateful_dataloader")
    signals = sys.modules["torch"].utils.data._utils.signal_handling
    monkeypatch.setattr(signals, "_SIGCHLD_handler_set", True)  # it would stay
    batches, _ = whole(data)

    def form(count: int) -> Any:
        return stateful.StatefulDataLoader(opened(data).as_torch(), batch_size=None, num_workers=count)

    first = form(workers[0])
    read = iter(first)
    assert [next(read)["input_ids"].tolist() for _ in range(3)] == batches[:3]
    state = json.loads(json.dumps(first.state_dict()))
    del read
    again = form(workers[0])
    again.load_state_dict(state)
    read = iter(again)
    assert [next(read)["input_ids"].tolist() for _ in range(3)] == batches[3:6]
    del read
    other = form(workers[1])
    other.load_state_dict(state)
    with pytest.raises(Exception, match="process dataloader"):
        next(iter(other))


def test_ranks_that_do_not_divide_the_lanes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lanes of text cannot be divided among 5 ranks"):
        Loader(text(Workspace.make(tmp_path)), seq_length=LENGTH, batch_size=5, world_size=5)


def test_a_position_of_text_that_was_not_reached_is_refused_before_the_first_batch_too(tmp_path: Path) -> None:
    with opened(text(Workspace.make(tmp_path))) as loader:
        for _ in range(2):
            with pytest.raises(ConfigError, match="position 40 of text is not between 0 and") as error:
                loader.state_dict(40)
            assert "steps taken times batch_size" in str(error.value)
            rows(loader)
