"""One actor rank as a Ray actor: ``ray.remote(ActorWorker).options(...).remote(...)`` with options of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from recipe_gkd.actor.ranks import RankReport, RankSpec, Rendezvous
from recipe_gkd.actor.student_actor import StudentActor
from recipe_gkd.config.schema import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.diagnostics.stack_dumps import enable_stack_dumps
from recipe_gkd.ray_cluster.placement import DeviceReport, device_report
from recipe_gkd.runtime.out_of_memory import out_of_memory_explained
from recipe_gkd.runtime.phase_memory import peak_bytes, reset_peak
from recipe_gkd.teachers.scoring.fetch import with_top_k
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.store import open_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class ActorWorker(StudentActor):
    """One actor rank in a Ray worker: a :class:`StudentActor` that fetches the teacher's rows and sends weights.

    Lifecycle::

        address = rank 0: rendezvous()
        all ranks: setup(address)
        all ranks: update(...), send_weights(...), save_checkpoint(...) ...
        all ranks: shutdown()

    Args:
        total_steps: Step at which the decay of the learning rate ends.
        rank: Global rank.
        world_size: Number of ranks.
        device: ``"cpu"`` or ``"cuda"``.
        n_token_ids: Number of token ids; see ``StudentActor``.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        rank: int,
        world_size: int,
        device: str,
        n_token_ids: int | None = None,
    ) -> None:
        enable_stack_dumps()
        # Ray makes only this worker's device visible.
        spec = RankSpec(rank=rank, world_size=world_size, local_rank=0, device=device, rendezvous=None)
        super().__init__(config, spec, total_steps=total_steps, n_token_ids=n_token_ids)
        self._store: TCPStore | None = None

    def device_report(self) -> DeviceReport:
        """Return the node and the devices of this worker."""
        return device_report(self.device.type)

    def path_exists(self, path: str) -> bool:
        """Return True if a path exists on this worker's node."""
        return Path(path).exists()

    def rendezvous(self) -> tuple[str, int]:
        """Open the store for the rendezvous of all ranks and return its host and port. Called on rank 0 only."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host, self._config.actor_rollout_ref.nccl_timeout)
        return host, self._store.port

    def setup(self, rendezvous: Rendezvous | None = None) -> RankReport:
        """Set up the actor with the store at the given address, which rank 0 has opened."""
        report = super().setup(self._store or rendezvous)
        timeout_s = self._config.actor_rollout_ref.nccl_timeout
        self._weights = WeightSenderApi(self, rank=self.rank, device=self.device, timeout_s=timeout_s)
        return report

    def fetch_rows(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples with the teacher's rows, which only the last pipeline stage reads."""
        if not self.layout.is_last_stage:
            return samples
        # Half of the driver's deadline, so that the error of this rank comes first and names the cause.
        return with_top_k(samples, self._config.actor_rollout_ref.actor.timeout_s / 2)

    def reset_peak_memory(self) -> None:
        """Start a phase; see :func:`~recipe_gkd.runtime.phase_memory.reset_peak`."""
        reset_peak(self.device.type)

    def peak_memory(self) -> int:
        """Return the memory of a phase in bytes; see :func:`~recipe_gkd.runtime.phase_memory.peak_bytes`."""
        return peak_bytes(self.device.type)

    def open_weight_store(self) -> tuple[str, int]:
        """Open the store for the weight transport and return its host and port. Called on rank 0 only."""
        return self._weights.open_store(ray.util.get_node_ip_address())

    def connect_weight_transport(self, address: TransportAddress) -> None:
        """Open the weight transport and wait for the receivers. Called on rank 0 only."""
        self._weights.connect(address)

    def send_weights(self, version: int, bucket_bytes: int) -> TransferStats | None:
        """Send the weights as ``version`` in buckets; return the statistics on rank 0."""
        label = f"actor rank {self.rank}"
        with out_of_memory_explained(pool="actor", phase="weight sync", label=label, sizes=self.state_sizes):
            return self._weights.send(version, bucket_bytes)

    def shutdown(self) -> None:
        """Close the weight transport and shut the actor down."""
        self._weights.close()
        super().shutdown()
