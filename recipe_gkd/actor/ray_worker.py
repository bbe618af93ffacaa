"""One actor rank as a Ray actor: ``ray.remote(ActorWorker).options(...).remote(...)`` with options of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from recipe_gkd.config.schema import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.diagnostics.stack_dumps import enable_stack_dumps
from recipe_gkd.ray_cluster.placement import device_report
from recipe_gkd.runtime.out_of_memory import MemoryPhase, out_of_memory_explained
from recipe_gkd.runtime.phase_memory import peak_bytes, reset_peak
from recipe_gkd.scoring.fetch import with_top_k
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.store import open_store
from teacher.free_memory import MemoryTrimmer

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from recipe_gkd.actor.log_probs import Continuation


class ActorWorker:
    """One actor rank in a Ray worker.

    The methods are those of :class:`~recipe_gkd.actor.student_actor.StudentActor`, which must be called on all ranks
    at once, and those of :class:`~recipe_gkd.weight_sync.sender_api.WeightSenderApi`.

    Lifecycle::

        address = rank 0: rendezvous()
        all ranks: setup(*address)
        all ranks: update(...), send_weights(...), save_checkpoint(...) ...
        all ranks: shutdown()

    Args:
        config: Configuration of the run.
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
        self._config, self._total_steps, self._n_token_ids = config, total_steps, n_token_ids
        self._rank, self._world_size, self._device = rank, world_size, device
        self._store: TCPStore | None = None
        self._trimmer = MemoryTrimmer()

    def device_report(self) -> dict[str, Any]:
        """Return the node and the devices of this worker."""
        return device_report(self._device)

    def path_exists(self, path: str) -> bool:
        """Return True if a path exists on this worker's node."""
        return Path(path).exists()

    def rendezvous(self) -> tuple[str, int]:
        """Open the store for the rendezvous of all ranks and return its host and port. Called on rank 0 only."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host, self._config.actor_rollout_ref.nccl_timeout)
        return host, self._store.port

    def setup(self, master_addr: str, master_port: int) -> dict[str, Any]:
        """Set up the actor with the store at the given address, and return its report."""
        # Imported here, because the import takes seconds and the driver does not need it.
        from recipe_gkd.actor.ranks import RankSpec
        from recipe_gkd.actor.student_actor import StudentActor

        rank_spec = RankSpec(
            rank=self._rank,
            world_size=self._world_size,
            local_rank=0,  # Ray makes only this worker's device visible
            device=self._device,
            rendezvous=self._store or (master_addr, master_port),
        )
        self.actor = StudentActor(self._config, rank_spec, total_steps=self._total_steps, n_token_ids=self._n_token_ids)
        with self._memory_explained("start"):
            report = self.actor.setup()
        self.weights = WeightSenderApi(
            self.actor,
            rank=report["rank"],
            device=self.actor.device,
            timeout_s=self._config.actor_rollout_ref.nccl_timeout,
        )
        return report

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Run one optimizer step on this data-parallel rank's shard."""
        metrics = self.actor.update(self._with_top_k(samples), step)
        self._trimmer.trim_if_due()
        return metrics

    def prepare_update(self) -> None:
        """Begin to move offloaded weights and gradients to the device."""
        with self._memory_explained("update"):
            self.actor.prepare_update()

    def release_states(self) -> None:
        """Release all memory of the device that this rank does not need between two calls."""
        self.actor.release_states()

    def log_probs(self, continuations: Sequence[Continuation]) -> list[list[float]]:
        """Return the log-probability of each token of each continuation of a context."""
        with self._memory_explained("log-probabilities"):
            return self.actor.log_probs(continuations)

    def kl_sums(self, samples: Sequence[Sample], step: int) -> dict[int, tuple[float, float]]:
        """Return sums of the KL divergences to the teacher by uid, over the tokens that this rank computes."""
        with self._memory_explained("validation"):
            return self.actor.kl_sums(self._with_top_k(samples), step)

    def _with_top_k(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples with the teacher's rows, which only the last pipeline stage reads."""
        if not self.actor.layout.is_last_stage:
            return samples
        # Half of the driver's deadline, so that the error of this rank comes first and names the cause.
        return with_top_k(samples, self._config.actor_rollout_ref.actor.timeout_s / 2)

    def reset_peak_memory(self) -> None:
        """Start a phase; see :func:`~recipe_gkd.runtime.phase_memory.reset_peak`."""
        reset_peak(self._device)

    def peak_memory(self) -> int:
        """Return the memory of a phase in bytes; see :func:`~recipe_gkd.runtime.phase_memory.peak_bytes`."""
        return peak_bytes(self._device)

    def weights_meta(self) -> list[TensorMeta]:
        """Return name, shape and dtype of each exported tensor."""
        return self.actor.weights_meta()

    def open_weight_store(self) -> tuple[str, int]:
        """Open the store for the weight transport and return its host and port. Called on rank 0 only."""
        return self.weights.open_store(ray.util.get_node_ip_address())

    def connect_weight_transport(self, labels: list[str], transport: str) -> None:
        """Wait for the receivers ``labels`` and open the weight transport. Called on rank 0 only."""
        self.weights.connect(labels, transport)

    def send_weights(self, version: int, bucket_bytes: int) -> TransferStats | None:
        """Send the weights as ``version`` in buckets; return the statistics on rank 0."""
        with self._memory_explained("weight sync"):
            return self.weights.send(version, bucket_bytes)

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face folder."""
        with self._memory_explained("save"):
            self.actor.save_hf(path)

    def save_checkpoint(self, path: str) -> None:
        """Write a checkpoint, in the background if so configured."""
        with self._memory_explained("save"):
            self.actor.save_checkpoint(path)

    def finish_saves(self, wait: bool = True) -> bool:
        """Complete the save in the background; return True if no save is in progress any more."""
        return self.actor.finish_saves(wait)

    def load_checkpoint(self, path: str) -> int:
        """Restore a checkpoint and return the number of completed updates."""
        with self._memory_explained("load"):
            return self.actor.load_checkpoint(path)

    def set_total_steps(self, total_steps: int) -> None:
        """Set the step at which the decay of the learning rate ends."""
        self.actor.set_total_steps(total_steps)

    def _memory_explained(self, phase: MemoryPhase) -> AbstractContextManager[None]:
        """Return a context in which a lack of memory becomes an error with the keys to change."""
        return out_of_memory_explained(
            pool="actor", phase=phase, label=f"actor rank {self._rank}", sizes=self.actor.state_sizes
        )

    def shutdown(self) -> None:
        """Close the weight transport and shut the actor down."""
        self.weights.close()
        self.actor.shutdown()
