"""Experts of the tokens of samples, and models of transformers that use them.

Shape suffixes: N tokens of a sequence, V experts of a layer, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recipe_gkd.data.samples import Sample


def with_experts(samples: Sequence[Sample], hf: Any, *, every_token: bool = False) -> list[Sample]:
    """Return the samples with random experts for each token.

    Args:
        hf: Configuration of the model.
        every_token: False: the first tokens of each sequence have none, and some sequences have none.
    """
    rng = np.random.default_rng(len(samples))
    n_experts, n_chosen = n_experts_of(hf), hf.num_experts_per_tok
    found = []
    for sample in samples:
        shape = (sample.n_tokens - 1, hf.num_hidden_layers, n_experts)
        experts_PX = rng.random(shape).argsort(-1)[..., :n_chosen].astype(np.int16)
        if not every_token:
            experts_PX[: rng.integers(0, 3)] = -1
        has_none = not every_token and sample.prompt.uid % 4 == 3
        found.append(with_routing(sample, None if has_none else experts_PX))
    return found


def with_routing(sample: Sample, experts_PX: np.ndarray | None) -> Sample:
    """Return the sample with experts of its tokens."""
    return replace(sample, response=replace(sample.response, routed_experts_PX=experts_PX))


def n_experts_of(hf: Any) -> int:
    """Return the number of experts of a layer."""
    return int(getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None) or hf.n_routed_experts)


@dataclass
class Agreement:
    """Number of given choices, and number of those that the model would have made."""

    n_given: int = 0
    n_same: int = 0


@dataclass
class ForcedExperts:
    """Experts of sequences, by their tokens. :meth:`force` makes a model of transformers use them.

    ``torch.topk`` of scores of all experts returns the given ids in the routers, and ``torch.topk`` of scores of groups
    returns all groups, so that each router computes the weights of the given experts as always.
    """

    experts: dict[tuple[int, ...], np.ndarray]
    agreements: list[Agreement] = field(default_factory=list)
    current: np.ndarray | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> ForcedExperts:
        """Return the experts of samples."""
        routed = [(sample.token_ids.tolist(), sample.response.routed_experts_PX) for sample in samples]
        return cls({tuple(ids): experts_PX for ids, experts_PX in routed if experts_PX is not None})

    def force(self, model: Any) -> None:
        """Make the routers of a model use the experts."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        for layer, block in enumerate(model.model.layers):
            for router in _routers(block):
                router.forward = partial(self._route, layer, n_experts_of(model.config), router.forward)

    def _before(self, model: Any, args: Any, kwargs: Any) -> None:
        [ids_N] = args[0] if args else kwargs["input_ids"]
        self.current = self.experts.get(tuple(ids_N.tolist()))
        self.agreements.append(Agreement())

    def _route(self, layer: int, n_experts: int, forward: Any, *args: Tensor) -> Any:
        if self.current is None:
            return forward(*args)
        with _GivenExperts(torch.as_tensor(self.current[:, layer]).long(), n_experts, self.agreements[-1]):
            return forward(*args)


class _GivenExperts(TorchFunctionMode):
    def __init__(self, ids_PX: Tensor, n_experts: int, agreement: Agreement) -> None:
        super().__init__()
        self.ids_PX, self.n_experts, self.agreement = ids_PX, n_experts, agreement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return found
        scores_NV, ids_NX = args[0], found[1]
        if scores_NV.shape[1] != self.n_experts:  # groups
            ids_NX = torch.arange(scores_NV.shape[1]).expand(len(scores_NV), -1)
        else:
            given_PX = self.ids_PX
            is_given_P1 = (given_PX >= 0).all(1, keepdim=True)
            own_PX = ids_NX[: len(given_PX)]
            is_same_PX = (given_PX[:, :, None] == own_PX[:, None]).any(2) & is_given_P1
            self.agreement.n_same += int(is_same_PX.sum())
            self.agreement.n_given += int(is_given_P1.sum()) * given_PX.shape[1]
            ids_NX = torch.cat([given_PX.where(is_given_P1, own_PX), ids_NX[len(given_PX) :]])
        return scores_NV.gather(1, ids_NX), ids_NX


def chosen_experts(model: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the experts that a model of transformers chooses for all of their tokens."""
    routed: dict[int, Tensor] = {}

    def keep(layer: int, router: Any, args: Any, output: Any) -> None:
        routed[layer] = output[2]

    for layer, block in enumerate(model.model.layers):
        for router in _routers(block):
            router.register_forward_hook(partial(keep, layer))
    found = []
    for sample in samples:
        with torch.no_grad():
            model(torch.as_tensor(sample.token_ids).long()[None])
        unused = torch.zeros_like(next(iter(routed.values())))
        layers = [routed.get(layer, unused) for layer in range(len(model.model.layers))]
        found.append(with_routing(sample, torch.stack(layers, 1).numpy().astype(np.int16)))
    return found


def _routers(block: Any) -> list[Any]:
    """Return the router of a layer, or nothing if the layer is dense."""
    return [getattr(block.mlp, name) for name in ("gate", "router") if hasattr(block.mlp, name)]
