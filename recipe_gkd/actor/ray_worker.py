"""One actor rank as a Ray actor: ``ray.remote(ActorWorker).options(...).remote(...)``, with the options of the caller."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import ray

from recipe_gkd.actor.export import WeightMeta
from recipe_gkd.actor.megatron_actor import MegatronActor
from recipe_gkd.config.schema import Config
from recipe_gkd.samples import Sample


class ActorWorker:
    """The methods of :class:`MegatronActor`; those that need all ranks are to be called on all, without waiting between."""

    def __init__(self, config: Config, *, total_steps: int, rank: int, world_size: int, device: str) -> None:
        self._arguments: dict[str, Any] = dict(
            config=config, total_steps=total_steps, rank=rank, world_size=world_size, device=device
        )

    def rendezvous(self) -> tuple[str, int]:
        """Asked of rank 0: this node's address and a free port, where all ranks are to meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def setup(self, master_addr: str, master_port: int) -> dict[str, Any]:
        # Ray makes only this worker's device visible, so it is number 0 here whatever the node has.
        self.actor = MegatronActor(
            **self._arguments, local_rank=0, master_addr=master_addr, master_port=master_port
        )
        return self.actor.setup()

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self.actor.update(samples)

    def weights_meta(self) -> list[WeightMeta]:
        return self.actor.weights_meta()

    def save_hf(self, path: str) -> None:
        self.actor.save_hf(path)

    def save_checkpoint(self, path: str) -> None:
        self.actor.save_checkpoint(path)

    def finish_saves(self) -> None:
        self.actor.finish_saves()

    def load_checkpoint(self, path: str) -> None:
        self.actor.load_checkpoint(path)

    def shutdown(self) -> None:
        self.actor.shutdown()
