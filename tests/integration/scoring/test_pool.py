"""Scoring workers in real Ray actors, with a real proxy and fake engines: results, faults, and where rows are."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from recipe_gkd.config.support import Support
from recipe_gkd.data.samples import Prompt, Response, Sample, StoredTopK, TeacherTopK
from recipe_gkd.errors import ResourceError, WorkerDied, WorkerError
from recipe_gkd.ray_cluster.node_probe import ActorLocation, own_node
from recipe_gkd.ray_cluster.worker_errors import unwrap
from recipe_gkd.runtime import wait_log
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout
from recipe_gkd.runtime.wait_log import WaitLog
from recipe_gkd.teachers.cache.scores import CacheSettings
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.router import open_teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.scoring import pool as pool_module
from recipe_gkd.teachers.scoring.fetch import with_top_k
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from teacher.client import ClientSpec, TeacherClient
from teacher.errors import TeacherChanged, TeacherRequestError, TeacherTimeout
from teacher.proxy import Proxy
from teacher.records import TeacherSequence
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.fake_teachers import REFUSED, K, OffsetEngine, fake_scores
from tests._support.fake_worker import running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import running_proxy
from tests._support.waiting import PATIENCE_S, wait_until_async

FREED_AFTER_S = 2.0
"""Time after which Ray has deleted unused arguments of a constructor (RAY_free_objects_period_milliseconds is 1000)."""

pytestmark = pytest.mark.usefixtures("ray_session")


def sequence(uid: int, n_tokens: int = 6) -> TeacherSequence:
    return TeacherSequence(np.arange(uid, uid + 2 + n_tokens, dtype=np.int32) % 50, 2)


def request(n: int, teacher: str = "a", sequences: Sequence[TeacherSequence] | None = None) -> TeacherRequest:
    sequences = sequences or [sequence(uid) for uid in range(n)]
    return TeacherRequest(teacher=teacher, step=3, uids=range(len(sequences)), sequences=sequences)


@contextmanager
def scoring(
    specs: dict[str, ClientSpec],
    *,
    max_restarts: int = 2,
    per_node: int = 1,
    caches: dict[str, CacheSettings] | None = None,
) -> Iterator[ScoringPool]:
    """Run scoring workers on this node. Limits of the tests begin after the start of the processes."""
    node = own_node()
    pool = ScoringPool.start(specs, {node: "here"}, per_node=per_node, max_restarts=max_restarts, caches=caches)
    pool.homes = Homes((node,), (0,))
    try:
        ray.get([handle.__ray_ready__.remote() for handle in pool.group.handles], timeout=PATIENCE_S)
        yield pool
    finally:
        asyncio.run(pool.group.stop(timeout_s=5))


@pytest.fixture
def engine() -> OffsetEngine:
    return OffsetEngine(0)


@pytest.fixture
def service(engine: OffsetEngine) -> Iterator[Proxy]:
    with running_proxy() as proxy, running_worker(proxy.backend_port, engine):
        yield proxy


def spec_of(proxy: Proxy, **options: Any) -> ClientSpec:
    """Return the description of a client that knows the model of the service."""
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=PATIENCE_S, **options) as client:
        client.hello()
        return client.spec()


def spec_with_last_tokens(proxy: Proxy) -> ClientSpec:
    """Return a description that Ray stores as an object, because it is above 100 KiB."""
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=PATIENCE_S) as client:
        spec = replace(client.spec(), model=client.hello())
    assert len(pickle.dumps(spec)) > 100 << 10
    return spec


def fetched(scores: Sequence[StoredTopK], sequences: Sequence[TeacherSequence]) -> list[TeacherTopK]:
    """Return the rows of scores, read as an actor rank reads them."""
    samples = []
    for uid, (stored, each) in enumerate(zip(scores, sequences, strict=True)):
        ids_T = each.token_ids[each.prompt_len :]
        zeros_T = np.zeros(len(ids_T), np.float32)
        response = Response(
            uid=uid, ids=ids_T, logprobs=zeros_T, finish_reason="stop", weights_version=0, versions_T=ids_T
        )
        samples.append(Sample(prompt=Prompt(uid=uid, ids=ids_T[:1], row=0), response=response, teacher=stored))
    return [sample.top_k for sample in with_top_k(samples, timeout_s=PATIENCE_S)]


def assert_scored(scores: Sequence[StoredTopK], sequences: Sequence[TeacherSequence], offset: int = 0) -> None:
    for rows, each in zip(fetched(scores, sequences), sequences, strict=True):
        expected = fake_scores(each, offset)
        assert np.array_equal(rows.ids_TK, expected.topk_ids_TK)
        assert np.array_equal(rows.logps_TK, expected.topk_logps_TK.astype(rows.logps_TK.dtype))
        assert np.array_equal(rows.sampled_logps_T, expected.sampled_logps_T)


async def pid_of(pool: ScoringPool) -> int:
    """Return the process id of the first worker."""
    await pool.scores(request(1), PATIENCE_S)
    return pool._pids[0]


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(body())  # type: ignore[arg-type]


class TestResults:
    def test_scores_of_two_teachers_are_theirs_in_order_and_in_the_type_of_the_wire(
        self, service: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool_module, "PART_BYTES", 3 * 6 * K * 6)  # three sequences of six float16 rows

        async def body() -> None:
            await pool.connect(PATIENCE_S)
            of_a, of_b = await asyncio.gather(
                pool.scores(request(8), PATIENCE_S), pool.scores(request(5, "b"), PATIENCE_S)
            )
            assert_scored(of_a, request(8).sequences)
            assert_scored(of_b, request(5).sequences, offset=50)
            assert [scores.index for scores in of_a] == [0, 1, 2, 0, 1, 2, 0, 1]
            assert len({scores.block for scores in of_a}) == 3
            assert {scores.home for scores in of_a} == {0}
            assert {scores.n_bytes for scores in of_a} == {6 * K * 6}
            assert {rows.logps_TK.dtype for rows in fetched(of_a, request(8).sequences)} == {np.dtype(np.float16)}

        with (
            running_proxy() as other,
            running_worker(other.backend_port, OffsetEngine(50)),
            scoring(
                {"a": spec_of(service, wire_dtype="float16"), "b": spec_of(other, wire_dtype="float16")}, per_node=2
            ) as pool,
        ):
            run(body)

    def test_scores_of_the_cache_are_not_requested_again(
        self, service: Proxy, engine: OffsetEngine, tmp_path: Path
    ) -> None:
        spec, asked = spec_of(service), request(4)
        config = base_config(
            f"actor_rollout_ref.teacher.cache_dir={tmp_path}",
            f"actor_rollout_ref.teacher.server_port={service.frontend_port}",
        )
        with open_teachers(config, Routes(("default",))) as teachers:
            [cache] = open_caches(config, teachers.clients).values()
        engine.added.acquire()  # the probe
        n_added = []
        for is_known in (False, True):  # two runs
            with scoring({"a": spec}, caches={"a": cache}) as pool:
                found = asyncio.run(pool.scores(asked, PATIENCE_S))
                assert [scores.is_cached for scores in found] == [is_known] * 4
                assert_scored(found, asked.sequences)
            n_added.append(sum(1 for _ in iter(lambda: engine.added.acquire(blocking=False), False)))
        assert n_added == [4, 0]

    def test_scores_extended_to_a_longer_response_have_absent_rows(self, service: Proxy) -> None:
        async def body() -> None:
            [scores] = await pool.scores(request(1), PATIENCE_S)
            longer = TeacherSequence(np.append(sequence(0).token_ids, [7, 7]).astype(np.int32), 2)
            [rows] = fetched([scores.extended(8)], [longer])
            assert rows.is_scored_T.tolist() == [True] * 6 + [False] * 2 == scores.extended(8).is_scored_T.tolist()
            assert rows.n_scored == scores.n_scored == 6

        with scoring({"a": spec_of(service)}) as pool:
            run(body)

    def test_loopback_service_is_used_on_the_node_of_the_driver(self, service: Proxy) -> None:
        async def body() -> None:
            pool.homes = Homes(("another node",), (0,))
            scores = await pool.scores(request(2), PATIENCE_S)
            assert_scored(scores, request(2).sequences)
            assert {each.home for each in scores} == {-1}

        with scoring({"a": spec_of(service)}) as pool:
            run(body)


class TestErrors:
    def test_refused_request_raises_the_error_of_the_service(self, service: Proxy) -> None:
        async def body() -> None:
            refused = TeacherSequence(np.array([1, 2, REFUSED], np.int32), 1)
            with raises(TeacherRequestError, uid=12, sequence=1, argument="token_ids"):
                await pool.scores(replace(request(2, sequences=[sequence(0), refused]), uids=[11, 12]), PATIENCE_S)

        with scoring({"a": spec_of(service)}) as pool:
            run(body)

    def test_service_without_result_is_a_timeout_of_the_teacher(self, service: Proxy, engine: OffsetEngine) -> None:
        async def body() -> None:
            with raises(TeacherTimeout, stage="scoring"):
                await pool.scores(request(2), 0.5)

        engine.step = list  # type: ignore[method-assign, assignment]  # no result
        with scoring({"a": spec_of(service)}) as pool:
            run(body)

    def test_canceled_request_is_canceled_at_the_service(self, service: Proxy, engine: OffsetEngine) -> None:
        async def body() -> None:
            waiting = asyncio.create_task(pool.scores(request(3), PATIENCE_S))
            await wait_until_async(lambda: len(engine._waiting) == 3)
            waiting.cancel()
            await asyncio.wait([waiting])
            await wait_until_async(lambda: not engine._waiting)

        engine.step = list  # type: ignore[method-assign, assignment]
        with scoring({"a": spec_of(service)}) as pool:
            run(body)

    def test_other_model_is_refused_at_the_start(self, service: Proxy) -> None:
        spec = spec_of(service)
        with TeacherClient(server_port=service.frontend_port) as client:
            info = client.hello()
        other = ClientSpec(spec.server_ip, spec.server_port, spec.options, model=replace(info, model_name="other"))
        with scoring({"a": other}) as pool, raises(WorkerError, worker="scoring worker 0 of 1") as caught:
            asyncio.run(pool.connect(PATIENCE_S))
        assert caught.value.__cause__ is not None
        cause = unwrap(caught.value.__cause__)
        assert isinstance(cause, TeacherChanged) and cause.teacher == "a"

    def test_node_that_cannot_reach_the_service_is_named(self) -> None:
        unreachable = ClientSpec("127.0.0.1", free_port(), {"timeout_s": 5})
        with (
            scoring({"math": unreachable}) as pool,
            raises(ResourceError, node="here"),
        ):
            asyncio.run(pool.connect(1))


class TestFaults:
    def test_killed_worker_is_restarted_and_its_requests_are_repeated(
        self, service: Proxy, engine: OffsetEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def body() -> None:
            pid = await pid_of(pool)
            before = await pool.scores(request(4), PATIENCE_S)
            await asyncio.sleep(FREED_AFTER_S)
            step, engine.step = engine.step, list  # type: ignore[method-assign, assignment]
            long = [sequence(uid, n_tokens=10_000) for uid in range(5)]  # 200 kB, more than Ray sends inline
            waiting = asyncio.create_task(pool.scores(request(5, sequences=long), PATIENCE_S))
            await wait_until_async(lambda: len(engine._waiting) == 5)
            os.kill(pid, signal.SIGKILL)
            engine.step = step  # type: ignore[method-assign]
            assert_scored(await waiting, long)
            assert_scored(before, request(4).sequences)  # results of the dead process are kept
            assert pool.n_restarts == 1 and f"scoring worker 0 of 1 died (process {pid})" in caplog.text

        with scoring({"a": spec_of(service)}) as pool:
            run(body)

    def test_worker_that_ray_cannot_start_again_is_not_called_used_up(self, service: Proxy) -> None:
        async def body() -> None:
            pid = await pid_of(pool)
            await asyncio.sleep(FREED_AFTER_S)
            os.kill(pid, signal.SIGKILL)
            with raises(WorkerDied, worker="scoring worker 0 of 1") as died:
                await pool.scores(request(1), PATIENCE_S)
            assert "max_worker_restarts=2 allows more" in died.value.details[-1]

        with scoring({"a": spec_with_last_tokens(service)}) as pool:
            run(body)

    def test_wait_for_a_stopped_worker_is_logged_with_samples_deadline_and_key(
        self, service: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(wait_log, "_waits", WaitLog(first_line_s=0.2, repeat_s=60))
        caplog.set_level(logging.INFO, logger="recipe_gkd")
        timeout_s = KeyedTimeout(120, "teacher.timeout_s")
        line = "waits 0 of 120 s (teacher.timeout_s) for 4 samples of teacher a, by scoring worker 0"

        async def body() -> None:
            pid = await pid_of(pool)
            os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.create_task(pool.scores(request(4), timeout_s))
            await wait_until_async(lambda: f"score, step 3: {line}" in caplog.text)
            os.kill(pid, signal.SIGCONT)
            assert_scored(await waiting, request(4).sequences)

        with scoring({"a": spec_of(service)}) as pool:
            run(body)

    def test_worker_without_restarts_left_ends_the_run(self, service: Proxy) -> None:
        async def body() -> None:
            os.kill(await pid_of(pool), signal.SIGKILL)
            with raises(WorkerDied, worker="scoring worker 0 of 1") as died:
                await pool.scores(request(1), PATIENCE_S)
            assert "max_worker_restarts=0 is used up" in died.value.details[-1]

        with scoring({"a": spec_of(service)}, max_restarts=0) as pool:
            run(body)

    def test_worker_that_ray_is_starting_again_is_not_killed(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def locate(handles: Sequence[Any]) -> list[ActorLocation]:
            return [ActorLocation(pid=7, node_id="", node_ip="", dead=False, cause="")]  # Ray has no node for it yet

        monkeypatch.setattr(pool_module, "locate", locate)
        pool = ScoringPool({"a": ClientSpec("127.0.0.1", 1, {})}, "driver", lambda *_: None, per_node=1)
        pool.start_on({"driver": "a"})
        run(lambda: pool._kill_silent(0, 0.0))
        assert "does not answer" not in caplog.text

    @pytest.mark.slow
    def test_stopped_worker_is_a_timeout_without_its_node_and_is_killed_once_with_it(
        self, service: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(pool_module, "MARGIN_S", 0.5)

        async def unreachable(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
            raise TimeoutError

        async def body() -> None:
            os.kill(await pid_of(pool), signal.SIGSTOP)
            with monkeypatch.context() as during_fault:
                during_fault.setattr(pool_module, "run_on_node", unreachable)
                with raises(TeacherTimeout, worker="scoring worker 0 of 1", stage=""):
                    await pool.scores(request(1), 0.5)
            assert "does not answer, and was not killed: no answer of its node" in caplog.text
            first, second = await asyncio.gather(pool.scores(request(2), 4), pool.scores(request(3), 4))
            assert_scored(first, request(2).sequences)
            assert_scored(second, request(3).sequences)
            assert pool.n_restarts == 1 and caplog.text.count("its process was killed") == 1

        with scoring({"a": spec_of(service)}, max_restarts=1) as pool:
            run(body)


@pytest.mark.parametrize(
    ("position", "sequence", "uid"), [(1, 2, 13), (2, None, None), (None, None, None)], ids=["known", "foreign", "none"]
)
def test_error_of_a_part_gets_the_position_in_its_request_and_the_uid(
    position: int | None, sequence: int | None, uid: int | None
) -> None:
    part = TeacherRequestError("3 tokens", sequence=position, argument="token_ids")
    error = pool_module._with_uid(part, [11, 12, 13], [0, 2])
    assert (type(error), error.sequence, error.uid) == (TeacherRequestError, sequence, uid)
    assert str(error) == ("sample 13: 3 tokens" if uid else "3 tokens")


class TestNodes:
    def test_loopback_services_have_clients_on_the_node_of_the_driver_only(self) -> None:
        started: list[tuple[str, list[str]]] = []

        def start(specs: dict[str, ClientSpec], node: str, address: str) -> str:
            started.append((node, list(specs)))
            return f"worker on {address}"

        here, there = ClientSpec("127.0.0.1", 1, {}), ClientSpec("10.0.0.9", 1, {})
        pool = ScoringPool({"here": here, "there": there}, "driver", start, per_node=2)
        pool.start_on({"driver": "a", "other": "b"})
        assert started == [("driver", ["here", "there"])] * 2 + [("other", ["there"])] * 2
        only_here = ScoringPool({"here": here}, "driver", start, per_node=1)
        only_here.start_on({"driver": "a", "other": "b"})
        assert only_here.group.handles == ["worker on a"]

    def test_requests_to_a_loopback_service_are_divided_by_the_nodes_that_read_the_rows(self) -> None:
        pool = ScoringPool({"a": ClientSpec("127.0.0.1", 1, {"top_k": 4})}, "driver", lambda *_: None, per_node=1)
        pool.homes = Homes(("driver", "other"), (0, 1))
        assert pool._parts(request(4)) == [(0, [0, 2]), (0, [1, 3])]
        assert pool.node_shares() == {"driver": 1.0, "other": 0.5}

    def test_parts_are_sized_by_the_ids_of_each_sequence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reference response has the teacher's top k where a sampled one has the few ids of the student."""
        specs = {"a": ClientSpec("127.0.0.1", 1, {"top_k": 64})}
        support = Support(2, with_top_k=False, scores_references=True)
        pool = ScoringPool(specs, "driver", lambda *_: None, per_node=1, support=support)
        pool.homes = Homes(("driver",), (0,))
        assert pool.row_bytes == 64 * 8
        monkeypatch.setattr(pool_module, "PART_BYTES", 2 * 8 * 10)  # ten rows of two ids
        ids_N = np.zeros(6, np.int32)
        sampled = TeacherSequence(ids_N, 1, support_ids_TJ=np.zeros((5, 2), np.int32), with_top_k=False)
        sequences = [sampled, sampled, TeacherSequence(ids_N, 1), sampled]
        mixed = TeacherRequest(teacher="a", step=0, uids=range(4), sequences=sequences)
        assert pool._parts(mixed) == [(0, [0, 1]), (0, [2]), (0, [3])]

    def test_actors_on_a_new_node_get_a_worker_there(self, service: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        """The node of the actors may be lost."""

        async def body() -> None:
            await pool.connect(PATIENCE_S)
            pool._workers_of["lost node"] = pool._workers_of.pop(own_node())
            await pool.move(Homes((own_node(),), (0,)), PATIENCE_S)
            scores = await pool.scores(request(3), PATIENCE_S)
            assert_scored(scores, request(3).sequences)
            assert list(pool._pids) == [1] and len(pool.group) == 2

        with scoring({"a": spec_of(service)}) as pool:
            run(body)


def test_rows_stay_in_the_object_store(service: Proxy) -> None:
    """The driver holds a reference to large blocks, and Ray frees them with the last reference."""

    async def body() -> None:
        pool_scores = await pool.scores(request(1, sequences=[sequence(0, n_tokens=4000)]), PATIENCE_S)
        [block] = {scores.block for scores in pool_scores}
        location = ray.experimental.get_object_locations([block])[block]
        assert location["object_size"] > pool_scores[0].n_bytes > 100_000  # larger than what Ray sends inline
        assert location["node_ids"] == [own_node()]

    with scoring({"a": spec_of(service)}) as pool:
        run(body)


@ray.remote(num_cpus=0)
def wait_a_minute() -> None:
    time.sleep(3600)


@ray.remote(num_cpus=0)
class OwnerOfRows:
    """A process whose end takes its objects with it, also those that do not exist yet."""

    def reference(self) -> list[ray.ObjectRef]:
        return [wait_a_minute.remote()]


def test_lost_rows_are_a_worker_error(service: Proxy) -> None:
    """A node that died takes its rows with it. An actor rank must not wait for them."""

    async def body() -> None:
        sequences = [sequence(0)]
        scores = await pool.scores(request(1, sequences=sequences), PATIENCE_S)
        owner = OwnerOfRows.remote()
        (block,) = ray.get(owner.reference.remote(), timeout=PATIENCE_S)
        ray.kill(owner)
        with raises(WorkerError, worker=""):
            fetched([replace(scores[0], block=block)], sequences)

    with scoring({"a": spec_of(service)}) as pool:
        run(body)
