"""An error in the reload of one layer makes the engine unusable, with vLLM's own layerwise reload."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe_gkd.errors import WeightSyncError
from tests._support.errors import raises

LAYERS = ("first", "second", "third")


class Layer(torch.nn.Module):
    """A layer whose weight is loaded in three parts, like the projections of an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: Any, loaded: Tensor, part: int) -> None:  # vLLM knows the first argument by its name
        param.data.narrow(0, 2 * part, 2).copy_(loaded)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            self.add_module(name, Layer())
        loader = functools.partial(getattr(self, LAYERS[-1]).load)  # as some norms of vLLM have
        getattr(self, LAYERS[-1]).weight.weight_loader = loader

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            layer, part = name.split(".")
            parameter = getattr(self, layer).weight
            parameter.weight_loader(parameter, tensor, int(part))
            loaded.add(f"{layer}.weight")
        return loaded


def tensors(value: float) -> list[tuple[str, Tensor]]:
    return [(f"{layer}.{part}", torch.full((2, 4), value)) for layer in LAYERS for part in range(3)]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Receiver of a model, without a transport and vLLM's engine."""
    from vllm.model_executor.model_loader.reload import layerwise

    from recipe_gkd.rollout.vllm import reload as vllm_reload
    from recipe_gkd.rollout.vllm import weights as vllm_weights

    monkeypatch.setattr(vllm_reload, "set_current_vllm_config", lambda _: nullcontext())
    receiver: Any = object.__new__(vllm_weights.BucketReceiver)
    receiver.model, receiver.vllm_config, receiver.model_config = Model(), None, SimpleNamespace(dtype=torch.float32)
    receiver.device, receiver.outcome, receiver._buffered, receiver._reload = "cpu", {}, [], None
    receiver.adapter = None
    receiver.has_mixed_weights = receiver.reload_failed = False
    layerwise.record_metadata_for_reloading(receiver.model)
    yield receiver
    for layer in (receiver.model, *receiver.model.children()):
        layerwise.LAYERWISE_INFO.pop(layer, None)


def update(receiver: Any, value: float) -> None:
    receiver._load(tensors(value))
    receiver.finish_weight_update()


def test_complete_reloads_keep_the_memory_of_the_parameters(receiver: Any) -> None:
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in receiver.model.named_parameters()}
    for value in (1.0, 2.0):
        update(receiver, value)
        for name, parameter in receiver.model.named_parameters():
            assert parameter is before[name][0] and parameter.data_ptr() == before[name][1]
            assert bool((parameter == value).all())
    assert not receiver.reload_failed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("any other")])
def test_error_of_one_layer_is_permanent(receiver: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """After such an error vLLM has a layer without memory, and the next complete update used to succeed."""
    from vllm.model_executor.model_loader.reload import layerwise

    update(receiver, 1.0)
    original = layerwise.materialize_layer

    def fail(layer: Any, info: Any) -> None:
        if layer is receiver.model.second:
            raise error
        original(layer, info)

    monkeypatch.setattr(layerwise, "materialize_layer", fail)
    with pytest.raises(type(error)) as caught:
        receiver._load(tensors(2.0))
    assert caught.value is error
    assert receiver.reload_failed
    receiver.drop()
    monkeypatch.setattr(layerwise, "materialize_layer", original)
    with raises(WeightSyncError, tensors=("second.weight",)):
        update(receiver, 3.0)
    assert receiver.reload_failed


def test_parameter_in_other_memory_is_refused(receiver: Any) -> None:
    """CUDA graphs would read the memory that it had before."""
    receiver._load(tensors(1.0))
    finalize = receiver._reload.finalize

    def replace() -> None:
        finalize()
        receiver.model.third.weight.data = receiver.model.third.weight.data.clone()

    receiver._reload.finalize = replace
    with raises(WeightSyncError, tensors=("third.weight",)):
        receiver.finish_weight_update()
    assert receiver.reload_failed


def test_weight_that_the_model_copies_itself_is_named(receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameter has no memory during the reload, so the engine would go on with the old weight."""

    def copy(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, tensor in weights:
            receiver.model.second.weight.data.narrow(0, 2 * int(name[-1]), 2).copy_(tensor)
        return {"second.weight"}

    receiver._load([each for each in tensors(1.0) if not each[0].startswith("second")])
    monkeypatch.setattr(receiver.model, "load_weights", copy)
    receiver._load([each for each in tensors(1.0) if each[0].startswith("second")])
    with raises(WeightSyncError, tensors=("second.weight",)):
        receiver.finish_weight_update()
    assert receiver.has_mixed_weights and not receiver.reload_failed


def test_missing_weight_leaves_the_engine_usable(receiver: Any) -> None:
    receiver._load(tensors(1.0)[:-3])
    with raises(WeightSyncError, tensors=("third.weight",)):
        receiver.finish_weight_update()
    assert receiver.has_mixed_weights and not receiver.reload_failed
    update(receiver, 2.0)
    assert not receiver.has_mixed_weights
