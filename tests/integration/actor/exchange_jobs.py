"""Job that records the tensors which pipeline stages send and receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import has_torch_function

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import shard_of, started, update

Route = tuple[int, int, str]
"""Rank of the sender, rank of the receiver, and name of the process group."""
Exchanges = dict[Route, list[tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and data types of the tensors on each route, in order."""


class RankExchanges(NamedTuple):
    """Tensors that one rank sends and receives."""

    sent: Exchanges
    received: Exchanges


def record_exchanges(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> tuple[float, RankExchanges]:
    """Return the number of micro-batches of an update, and the tensors that it and an evaluation exchange."""
    found = RankExchanges(defaultdict(list), defaultdict(list))
    with started(rank, world_size, port, config) as actor, _recording(rank, found):
        metrics = update(actor, batch)
        actor.token_kl(shard_of(actor, batch), 0)
        return metrics["actor/micro_batches"], RankExchanges(dict(found.sent), dict(found.received))


@contextmanager
def _recording(rank: int, found: RankExchanges) -> Any:
    def recorded(function: Callable[..., Any], peer_key: str, exchanges: Exchanges) -> Callable[..., Any]:
        def exchange(tensor: torch.Tensor, peer: int | None = None, group: Any = None, **kwargs: Any) -> Any:
            in_group = kwargs.get(f"group_{peer_key}")
            other = dist.get_global_rank(group, in_group) if in_group is not None else kwargs.get(peer_key, peer)
            route = (rank, other) if exchanges is found.sent else (other, rank)
            if not has_torch_function((tensor,)):  # else the function calls itself again, from the mode of `on_host`
                exchanges[*route, group.group_name].append((tuple(tensor.shape), tensor.dtype))
            return function(tensor, *([] if peer is None else [peer]), group=group, **kwargs)

        return exchange

    functions = {"isend": recorded(dist.isend, "dst", found.sent), "irecv": recorded(dist.irecv, "src", found.received)}
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(dist, name, function))
            stack.enter_context(mock.patch.object(distributed_c10d, name, function))
        yield
