"""Comparison of every rollout engine with the actor after a weight sync, on tokens that the engine samples for it.

With a staleness bound of 0 a batch is trained on by the weights that sampled it, so the update compares all its tokens
and this probe is not needed. Otherwise the actor has newer weights when the responses arrive. Then each engine samples
a few tokens after the sync, as it samples responses, and the actor computes their log-probabilities.

The long context takes most of the time. It shows errors of the position embedding, which do not come and go with the
weights, so only the first ``mismatch_patience`` syncs of a run have it: enough to end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.cluster import GENERATION_RPC_MARGIN_S, Cluster
from recipe_gkd.config import Config
from recipe_gkd.config.staleness import staleness_bound
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, SYNC_TIMEOUT, timeout_of
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import GkdError
from recipe_gkd.rollout.limits import engine_length
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.rollout.sampling import PROBE_TOKENS
from recipe_gkd.runtime.keyed_timeout import with_margin
from recipe_gkd.weight_sync.model_check import MismatchGuard, default_bound

log = logging.getLogger(__name__)

N_SHORT_CONTEXTS = 4
MAX_CONTEXT_TOKENS = 1024


def mismatch_guard(config: Config, cluster: Cluster) -> MismatchGuard:
    """Return the guard of a run with these workers."""
    patience = config.actor_rollout_ref.rollout.mismatch_patience
    return MismatchGuard(mismatch_bound(config, cluster), patience, _dtypes(config, cluster))


def mismatch_bound(config: Config, cluster: Cluster) -> float | None:
    """Return the largest difference between engine and actor in nats, None if nothing is checked."""
    configured = config.actor_rollout_ref.rollout.mismatch_bound
    return rounding_bound(config, cluster) if configured == 0 else configured


def rounding_bound(config: Config, cluster: Cluster) -> float:
    """Return the largest difference in nats that rounding explains."""
    return default_bound(_dtypes(config, cluster), on_cpu="cpu" in cluster.actor_devices)


def _dtypes(config: Config, cluster: Cluster) -> set[str]:
    return {config.actor_rollout_ref.actor.dtype, cluster.engine_dtype}


def needs_probe(config: Config) -> bool:
    """Return True if updates alone cannot compare the engines with the actor.

    With ``trainer.inflight_update`` the requests of the probe would wait for responses in flight, while batches contain
    tokens of the present weights.
    """
    return staleness_bound(config.trainer) > 0 and not config.trainer.inflight_update


def probe_contexts(prompts: Sequence[np.ndarray], config: Config) -> list[np.ndarray]:
    """Return the contexts after which engines sample: evenly spaced prompts, and last a long one that joins prompts.

    The long context reaches positions at which an error of the position embedding is visible.

    Args:
        prompts: Token ids of the prompts of the data set, int32 [P] each.
    """
    longest = min(MAX_CONTEXT_TOKENS, engine_length(config) - PROBE_TOKENS)
    if longest < 1:
        return []
    short = [prompts[i * len(prompts) // N_SHORT_CONTEXTS][:longest] for i in range(N_SHORT_CONTEXTS)]
    joined: list[np.ndarray] = []
    while sum(map(len, joined)) < longest:
        joined.append(prompts[len(joined) % len(prompts)])
    return [*short, np.concatenate(joined)[:longest]]


class SyncProbe:
    """Comparison of all engines with the actor.

    Args:
        cluster: Connected workers.
        contexts: Result of :func:`probe_contexts`.
    """

    def __init__(self, config: Config, cluster: Cluster, contexts: Sequence[np.ndarray]) -> None:
        self._cluster = cluster
        self._timeout_s, self._actor_timeout_s = timeout_of(config, SYNC_TIMEOUT), timeout_of(config, ACTOR_TIMEOUT)
        self._prompts = [Prompt(uid=uid, ids=ids, row=uid) for uid, ids in enumerate(contexts)]
        self._n_long_left = config.actor_rollout_ref.rollout.mismatch_patience

    async def measure(self, version: int) -> dict[str, float]:
        """Sample on all engines and compare them with the actor; see :meth:`sample` and :meth:`compare`."""
        return await self.compare(await self.sample(version), version)

    async def sample(self, version: int) -> dict[str, list[Response]]:
        """Return responses of each engine by its label, the first times also to the long context.

        An engine that fails is left out.

        The next request to an engine that fails handles the failure.

        Args:
            version: Version of the weights that actor and engines have.
        """
        rollouts = self._cluster.rollouts
        prompts = self._prompts if self._n_long_left > 0 else self._prompts[:-1]
        self._n_long_left -= 1
        sampled = await asyncio.gather(*(self._sample(rank, prompts, version) for rank in range(len(rollouts))))
        return {rollouts.label(rank): responses for rank, responses in enumerate(sampled) if responses}

    async def compare(self, by_engine: Mapping[str, Sequence[Response]], version: int) -> dict[str, float]:
        """Return the mean absolute difference of the log-probabilities of engine and actor, in nats, by engine.

        Args:
            by_engine: Result of :meth:`sample`.
            version: Version of the weights that actor and engines have.

        Raises:
            GkdError: The actor failed.
        """
        # Engines usually sample the same tokens, which are sent once.
        ordered = sorted({_key(response) for responses in by_engine.values() for response in responses})
        if not ordered:
            return {}
        found = await self._cluster.actors.call(
            ActorWorker.log_probs,
            [(self._prompts[uid].ids.tolist(), list(ids)) for uid, ids in ordered],
            timeout_s=self._actor_timeout_s,
            phase=f"log-probabilities of v{version}",
        )
        expected = dict(zip(ordered, found[0], strict=True))
        return {
            label: float(np.abs(np.concatenate([r.logprobs - expected[_key(r)] for r in responses])).mean())
            for label, responses in by_engine.items()
        }

    async def _sample(self, rank: int, prompts: list[Prompt], version: int) -> list[Response]:
        """Return the responses of one engine that have tokens; none if it fails."""
        stream = self._cluster.rollouts.stream(
            rank,
            RolloutWorker.generate,
            prompts,
            version,
            "probe",
            self._timeout_s,
            timeout_s=with_margin(self._timeout_s, GENERATION_RPC_MARGIN_S),
            phase=f"weight sync v{version}, probe",
        )
        try:
            responses = [response async for some in stream for response in some]
        except GkdError as error:
            log.warning("weight sync v%d: an engine was not compared with the actor: %s", version, error)
            return []
        return [response for response in responses if len(response.ids)]


def _key(response: Response) -> tuple[int, tuple[int, ...]]:
    """Return the context and the ids of a response."""
    return response.uid, tuple(response.ids.tolist())
