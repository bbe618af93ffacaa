"""Number of teacher workers: from the services, from the user, or 1."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from recipe_gkd.config import Config
from recipe_gkd.config.teachers import requests_per_batch
from recipe_gkd.metrics.advice.resource_layout import ResourceLayout
from recipe_gkd.teachers.worker_count import with_worker_count
from recipe_gkd.trainer import pipeline_config
from teacher.client import TeacherClient
from tests._support.base_config import base_config
from tests._support.fake_teachers import service, worker_of
from tests._support.teacher_service import running_proxy
from tests._support.waiting import wait_until

TEACHER = "actor_rollout_ref.teacher"


def configured(*overrides: str) -> Config:
    return base_config(*(f"{TEACHER}.{override}" for override in overrides))


class TestWithWorkerCount:
    def test_null_uses_the_workers_of_all_services(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        with (
            running_proxy(0) as proxy,
            worker_of(proxy, 0),
            worker_of(proxy, 0),
            service(1) as port,
            TeacherClient(server_port=proxy.frontend_port) as pair,
            TeacherClient(server_port=port) as single,
        ):
            pair.hello(timeout_s=10)
            wait_until(lambda: len(pair.status().workers) == 2)
            config = with_worker_count(configured(), {"a": pair, "same": pair, "b": single})
            assert config.actor_rollout_ref.teacher.n_server_workers == 3
            assert pipeline_config(config, 1).requests_per_batch == 3 * 8
            assert ResourceLayout.of(config).n_teachers == 3
            assert f"teacher workers: 3 (2 at {pair.address}, 1 at {single.address})" in caplog.text

    def test_other_number_of_the_user_is_kept_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with service(0) as port, TeacherClient(server_port=port) as client:
            matching = with_worker_count(configured("n_server_workers=1"), {"a": client})
            assert not caplog.records and matching.actor_rollout_ref.teacher.n_server_workers == 1
            config = with_worker_count(configured("n_server_workers=4"), {"a": client})
        assert config.actor_rollout_ref.teacher.n_server_workers == 4
        assert "n_server_workers=4, but the teacher services have 1 workers" in caplog.text

    def test_backend_without_workers_counts_as_one(self, tmp_path: Path) -> None:
        config = with_worker_count(configured("backend=hf", f"model_path={tmp_path}"), {})
        assert config.actor_rollout_ref.teacher.n_server_workers == 1


def test_requests_per_batch_null_is_eight_per_worker() -> None:
    def requests(*overrides: str) -> int:
        return requests_per_batch(configured(*overrides).actor_rollout_ref.teacher)

    assert requests("num_microbatches=null") == 8
    assert requests("num_microbatches=null", "n_server_workers=3") == 24
    assert requests("num_microbatches=2", "n_server_workers=3") == 6
