"""One pool of real rollout workers for all tests of this folder, because an engine takes seconds to start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.engine_report import EngineReport
from recipe_gkd.rollout.environment import worker_environment
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.spec import TransportAddress, WeightSyncSpec
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from tests._support.rollout_models import (
    TEACHER_EOS,
    VOCABULARY,
    TinyActor,
    config_for,
    make_padded_model,
    prompts,
    store_output_layer,
)
from tests._support.waiting import PATIENCE_S

OLD, NEW = 1, 2  # seeds of the weights before and after a sync
TRANSPORT_TIMEOUT_S = 15.0
BUCKET_BYTES = 30_000
SHAPED = ["actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.top_p=0.95"]
N_STUDENT_IDS = 5
STUDENT_IDS = ["actor_rollout_ref.teacher.support=student", f"actor_rollout_ref.teacher.student_top_k={N_STUDENT_IDS}"]


def make_synchronizer(
    actor: WorkerGroup[Any],
    rollouts: WorkerGroup[Any],
    *,
    tensor_parallel_size: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    inflight: bool = False,
    timeout_s: float = TRANSPORT_TIMEOUT_S,
) -> WeightSynchronizer:
    """Return a synchronizer over gloo."""
    spec = WeightSyncSpec(
        tensor_parallel_size=tensor_parallel_size,
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        transport="collective",
        inflight=inflight,
    )
    return WeightSynchronizer(actor, rollouts, spec)


def environment() -> dict[str, Any]:
    return {"env_vars": worker_environment("cpu")}


@dataclass
class Pool:
    """Three rollout workers and an actor.

    Worker 0 starts from the tied weights OLD, worker 1 from the tied weights NEW in a folder that also stores the
    output layer, and worker 2 from the untied weights OLD. The output layer of the untied model is padded, and no token
    may come from the padding. Worker 2 samples with ``SHAPED``, returns ``STUDENT_IDS``, and also stops at
    ``TEACHER_EOS``.

    Attributes:
        handles: Ray handles of the workers.
        descriptions: Results of ``setup``.
        actor: Group of one :class:`TinyActor`.
        fresh: Greedy responses of each worker before its first sync, by uid.
    """

    handles: list[Any]
    descriptions: list[EngineReport]
    actor: WorkerGroup[TinyActor]
    fresh: dict[int, dict[int, Response]]

    def group(self, *ranks: int) -> WorkerGroup[RolloutWorker]:
        return WorkerGroup("rollout", [self.handles[rank] for rank in ranks])

    def sync(
        self,
        *ranks: int,
        bucket_bytes: int = 1 << 20,
        inflight: bool = False,
        timeout_s: float = TRANSPORT_TIMEOUT_S,
    ) -> WeightSynchronizer:
        return make_synchronizer(
            self.actor, self.group(*ranks), bucket_bytes=bucket_bytes, inflight=inflight, timeout_s=timeout_s
        )

    @contextmanager
    def configured(self, rank: int, config: Config) -> Iterator[None]:
        """Replace the configuration of a running worker, for example its deadlines, during the context."""

        def configure(worker: Any, config: Config) -> Config:
            before, worker._config = worker._config, config
            return before

        before = ray.get(self.handles[rank].__ray_call__.remote(configure, config), timeout=PATIENCE_S)
        try:
            yield
        finally:
            ray.get(self.handles[rank].__ray_call__.remote(configure, before), timeout=PATIENCE_S)

    def call_actor(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.actor.handles[0], method).remote(*args), timeout=PATIENCE_S)

    async def connect(self, rank: int) -> list[TensorMeta]:
        """Connect the actor and one worker, for a test that calls the phases of an update itself."""
        (host, port), worker = self.call_actor("open_weight_store"), self.group(rank)
        address = TransportAddress(host, port, "collective", ("actor worker 0", worker.label(0)))
        await asyncio.gather(
            self.actor.call(TinyActor.connect_weight_transport, address, timeout_s=PATIENCE_S, phase="connect"),
            worker.call(RolloutWorker.open_weight_transport, address, 1, timeout_s=PATIENCE_S, phase="connect"),
        )
        meta: list[TensorMeta] = self.call_actor("weights_meta")
        return meta

    async def transfer(
        self, rank: int, version: int, meta: list[TensorMeta], double_buffered: bool | None
    ) -> list[Any]:
        """Transfer an update, and return the results or exceptions of sender and receiver."""
        return await asyncio.gather(
            self.actor.call(TinyActor.send_weights, version, BUCKET_BYTES, timeout_s=PATIENCE_S, phase="send"),
            self.group(rank).call(
                RolloutWorker.receive_weights,
                version,
                meta,
                BUCKET_BYTES,
                double_buffered,
                timeout_s=PATIENCE_S,
                phase="receive",
            ),
            return_exceptions=True,
        )

    async def responses(
        self, rank: int, given: list[Prompt], step: int = 0, *, greedy: bool = False
    ) -> dict[int, Response]:
        return await generate_on(self.group(rank), 0, given, step, greedy=greedy)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Path]:
    """Return the Hugging Face folders by (seed, tied)."""
    root = tmp_path_factory.mktemp("models")
    result = {}
    for seed in (OLD, NEW):
        for tied in (True, False):
            result[seed, tied] = root / f"{seed}-{'tied' if tied else 'untied'}"
            make_padded_model(seed, tied=tied).save_pretrained(result[seed, tied])
    store_output_layer(result[NEW, True])
    return result


@pytest.fixture(scope="session")
def pool(ray_session: None, folders: dict[tuple[int, bool], Path]) -> Iterator[Pool]:
    worker = ray.remote(num_cpus=0, runtime_env=environment())(RolloutWorker)
    starts: list[tuple[tuple[int, bool], list[str], list[int]]] = [
        ((OLD, True), [], []),
        ((NEW, True), [], []),
        ((OLD, False), [*SHAPED, *STUDENT_IDS], [TEACHER_EOS]),
    ]
    timeout = f"actor_rollout_ref.nccl_timeout={TRANSPORT_TIMEOUT_S}"
    handles = [
        worker.remote(
            config_for(folders[model], timeout, *keys),
            rank=rank,
            device="cpu",
            stop_token_ids=stops,
            n_tokens=VOCABULARY,
            folder_version=0,
        )
        for rank, (model, keys, stops) in enumerate(starts)
    ]
    actor = ray.remote(num_cpus=0, runtime_env=environment())(TinyActor).remote(TRANSPORT_TIMEOUT_S)
    try:
        descriptions = ray.get([handle.setup.remote() for handle in handles], timeout=PATIENCE_S)
        ray.get(actor.__ray_ready__.remote(), timeout=PATIENCE_S)  # It may still load its modules.
        result = Pool(handles, descriptions, WorkerGroup("actor", [actor]), {})
        result.call_actor("set_weights", OLD, True)
        for rank in range(len(handles)):
            result.fresh[rank] = asyncio.run(result.responses(rank, prompts(12), greedy=True))
        yield result
        asyncio.run(result.group(0, 1, 2).call(RolloutWorker.shutdown, timeout_s=PATIENCE_S, phase="shutdown"))
    finally:
        for handle in [*handles, actor]:
            ray.kill(handle)


@pytest.fixture(scope="session")
def tensor_pair(ray_session: None, folders: dict[tuple[int, bool], Path]) -> Iterator[WorkerGroup[RolloutWorker]]:
    """One engine of two tensor ranks from the tied weights OLD. It has no weights version yet."""
    config = config_for(
        folders[OLD, True],
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"actor_rollout_ref.nccl_timeout={TRANSPORT_TIMEOUT_S}",
    )
    worker: Any = ray.remote(num_cpus=0, runtime_env=environment())(RolloutWorker).remote(config, rank=0, device="cpu")
    group: WorkerGroup[RolloutWorker] = WorkerGroup("rollout", [worker])
    try:
        ray.get(worker.setup.remote(), timeout=PATIENCE_S)
        yield group
        asyncio.run(group.call(RolloutWorker.shutdown, timeout_s=PATIENCE_S, phase="shutdown"))
    finally:
        ray.kill(worker)


async def generate_on(
    group: WorkerGroup[Any], rank: int, given: list[Prompt], step: int = 0, *, greedy: bool = False
) -> dict[int, Response]:
    """Return the responses of one worker by uid."""
    sampling = "validation" if greedy else "train"  # validation is greedy by default
    stream = group.stream(rank, RolloutWorker.generate, given, step, sampling, timeout_s=PATIENCE_S, phase="generate")
    return {response.uid: response async for batch in stream for response in batch}
