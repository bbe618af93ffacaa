"""Offloaded states: values, views and identity of tensors survive, and copies are made only when they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from recipe_gkd.actor.checkpoint import host_copy
from recipe_gkd.actor.offload import SLEEP_LEVEL, OffloadedStates, distinct_storages
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.errors import WorkerError
from teacher.common.out_of_memory import is_out_of_memory
from tests._support.errors import raises

CPU = torch.device("cpu")
PARAM_KEYS = tuple(f"actor_rollout_ref.actor.{section}.param_offload" for section in ("megatron", "fsdp_config"))


class Model:
    """Two tensors of a buffer, one of which is in both lists, gradients, and optimizer state that grows."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.arange(3000.0, device=device)
        self.views = [self.buffer[:1000].view(10, 100), self.buffer[500:]]
        self.grads = torch.ones(3000, device=device)
        self.moments = [torch.full((3000,), 2.0, dtype=torch.bfloat16, device=device)]

    def tensors_of(self, state: ActorState) -> list[Tensor]:
        return {"params": self.views, "grads": [self.grads], "optimizer": self.moments}[state]

    def n_bytes(self, state: ActorState) -> int:
        return sum(n_bytes for _, n_bytes in distinct_storages(self.tensors_of(state), self.buffer.device))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Model(torch.device(request.param))


@pytest.fixture
def states(model: Model) -> Iterator[OffloadedStates]:
    """Return all states of the model, which have left."""
    states = OffloadedStates(model.tensors_of, ("params", "grads", "optimizer"), model.buffer.device)
    states.leave()
    yield states
    states.close()


class TestOnDevice:
    def test_states_return_only_inside_of_outermost_context(self, model: Model, states: OffloadedStates) -> None:
        assert [model.n_bytes(state) for state in ("params", "grads", "optimizer")] == [0, 0, 0]
        with states.on_device("params"):
            with states.on_device("params", "grads"):
                assert model.n_bytes("params") == model.n_bytes("grads") == 12000
            assert model.n_bytes("params") == 12000 and model.n_bytes("grads") == 0
        assert model.n_bytes("params") == 0

    def test_views_and_values_survive(self, model: Model, states: OffloadedStates) -> None:
        for _ in range(2):
            with states.on_device("params", "optimizer", read_only=True):
                assert model.buffer.tolist() == list(range(3000)) and model.views[0][5, 1] == 501
                assert model.views[1].data_ptr() == model.buffer.data_ptr() + 2000
                assert (model.moments[0] == 2).all()

    def test_gradients_return_as_zeros(self, model: Model, states: OffloadedStates) -> None:
        with states.on_device("grads"):
            assert not model.grads.any()

    def test_changes_and_new_tensors_are_copied(self, model: Model, states: OffloadedStates) -> None:
        with states.on_device("params"):
            model.views[0].zero_()
        with states.on_device("optimizer", read_only=True):
            model.moments.append(torch.full((7,), 3.0, device=model.buffer.device))
        with states.on_device("params", "optimizer", read_only=True):
            assert model.buffer[:1001].tolist() == [0.0] * 1000 + [1000.0]
            assert (model.moments[0] == 2).all() and (model.moments[1] == 3).all()

    def test_unchanged_state_is_not_copied_again(self, model: Model, states: OffloadedStates) -> None:
        copy = states.host_copy("params")
        with patch.object(copy, "write", side_effect=AssertionError), states.on_device("params", read_only=True):
            assert model.n_bytes("params") == 12000
        changing = states.on_device("params")
        with pytest.raises(AssertionError), patch.object(copy, "write", side_effect=AssertionError), changing:
            pass

    def test_state_that_cannot_return_remains_complete(self, model: Model, states: OffloadedStates) -> None:
        copy = states.host_copy("params")
        failing = patch.object(copy, "read", side_effect=torch.OutOfMemoryError("too large"))
        with failing, raises(WorkerError) as caught, states.on_device("params"):
            pass
        assert SLEEP_LEVEL in caught.value.keys and is_out_of_memory(caught.value.__cause__)
        assert [line.split(":")[0] for line in caught.value.details] == ["memory"]
        assert model.n_bytes("params") == 0
        with states.on_device("params"):
            assert model.buffer.tolist() == list(range(3000))

    def test_state_that_cannot_be_copied_stays(self, model: Model, states: OffloadedStates) -> None:
        copy = states.host_copy("params")
        failing = patch.object(copy, "write", side_effect=OSError("no space"))
        with failing, raises(WorkerError, keys=PARAM_KEYS) as caught, states.on_device("params"):
            model.buffer[0] = 7
        assert isinstance(caught.value.__cause__, OSError)
        assert model.n_bytes("params") == 12000 and model.buffer[0] == 7
        with states.on_device("params"):
            model.buffer[1] = 7
        assert model.n_bytes("params") == 0
        with states.on_device("params"):
            assert model.buffer[:3].tolist() == [7, 7, 2]

    def test_state_that_is_not_offloaded_stays(self, model: Model) -> None:
        states = OffloadedStates(model.tensors_of, ["grads"], model.buffer.device)
        states.leave()
        with states.on_device("params", "optimizer"):
            pass
        assert model.n_bytes("params") == 12000 and states.is_offloaded("grads") and not states.is_offloaded("params")


def test_memory_that_numpy_shares_is_not_freed() -> None:
    model = Model(CPU)
    array = model.buffer.numpy()
    states = OffloadedStates(model.tensors_of, ["params"], CPU)
    with raises(WorkerError, keys=PARAM_KEYS) as caught:
        states.leave()
    assert caught.value.__cause__ is None
    assert array[2] == 2
    states.close()


@pytest.mark.gpu
def test_copy_for_gpu_is_pinned_and_divided_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(host_copy, "PINNED_BLOCK_BYTES", 4096)
    model = Model(torch.device("cuda"))
    states = OffloadedStates(model.tensors_of, ["params", "optimizer"], model.buffer.device)
    before = torch.cuda.memory_allocated()
    states.leave()
    assert torch.cuda.memory_allocated() <= before - 12000 - 6000
    blocks = states.host_copy("params").blocks  # type: ignore[union-attr]
    assert [len(block) for block in blocks] == [4096, 4096, 12000 - 2 * 4096]
    assert all(block.is_pinned() for block in blocks)
    with states.on_device("params", "optimizer", read_only=True):
        assert model.buffer.tolist() == list(range(3000)) and (model.moments[0] == 2).all()
    assert states.host_copy("params").blocks[0] is blocks[0], "blocks are allocated once"  # type: ignore[union-attr]
    states.close()
