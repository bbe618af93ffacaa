"""One actor rank as a Ray actor: ``ray.remote(ActorWorker).options(...).remote(...)``; the options are the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from recipe_gkd.config.schema import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.diagnostics.stack_dumps import enable_stack_dumps
from recipe_gkd.ray_cluster.placement import device_report
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.transport import open_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class ActorWorker:
    """The methods of :class:`MegatronActor`, to be called on all ranks at once, and those of :class:`WeightSenderApi`."""

    def __init__(
        self, config: Config, *, total_steps: int, rank: int, world_size: int, device: str, n_tokens: int | None = None
    ) -> None:
        enable_stack_dumps()
        self._config, self._device = config, device
        self._store: TCPStore | None = None
        self._arguments: dict[str, Any] = dict(
            config=config, total_steps=total_steps, rank=rank, world_size=world_size, device=device, n_tokens=n_tokens
        )

    def where(self) -> dict[str, Any]:
        return device_report(self._device)

    def sees(self, path: str) -> bool:
        """Whether a file that the driver has written is there on this worker's node too."""
        return Path(path).exists()

    def rendezvous(self) -> tuple[str, int]:
        """Asked of rank 0: open the store where all ranks are to meet; this node's address, and the store's port."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host, self._config.actor_rollout_ref.nccl_timeout)
        return host, self._store.port

    def setup(self, master_addr: str, master_port: int) -> dict[str, Any]:
        from recipe_gkd.actor.megatron_actor import MegatronActor  # seconds of imports, which the driver does not need

        # Ray makes only this worker's device visible, so it is number 0 here whatever the node has.
        meeting = self._store or (master_addr, master_port)
        self.actor = MegatronActor(**self._arguments, local_rank=0, meeting=meeting)
        report = self.actor.setup()
        self.weights = WeightSenderApi(
            self.actor,
            rank=report["rank"],
            device=self.actor.device,
            timeout_s=self._config.actor_rollout_ref.nccl_timeout,
        )
        return report

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        return self.actor.update(samples, step)

    def weights_meta(self) -> list[TensorMeta]:
        return self.actor.weights_meta()

    def open_weight_store(self) -> tuple[str, int]:
        return self.weights.open_store(ray.util.get_node_ip_address())

    def connect_weight_channel(self, labels: list[str], transport: str) -> None:
        self.weights.connect(labels, transport)

    def send_weights(self, version: int, bucket_bytes: int) -> TransferStats | None:
        return self.weights.send(version, bucket_bytes)

    def save_hf(self, path: str) -> None:
        self.actor.save_hf(path)

    def save_checkpoint(self, path: str) -> None:
        self.actor.save_checkpoint(path)

    def finish_saves(self, wait: bool = True) -> bool:
        return self.actor.finish_saves(wait)

    def load_checkpoint(self, path: str) -> int:
        return self.actor.load_checkpoint(path)

    def set_total_steps(self, total_steps: int) -> None:
        self.actor.set_total_steps(total_steps)

    def shutdown(self) -> None:
        self.weights.close()
        self.actor.shutdown()
