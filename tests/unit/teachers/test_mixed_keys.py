"""A run with two teacher services, one with keys and one without."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np

from recipe_gkd.teachers.router import open_teachers
from recipe_gkd.teachers.routes import Routes
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.wire.auth import server_keys
from teacher.wire.make_keys import make_keys
from teacher.worker import Worker
from tests._support.base_config import base_config
from tests._support.fake_teachers import OffsetEngine, is_scored_by, pair, service
from tests._support.teacher_service import StopFlag, running_proxy

KEY = "actor_rollout_ref.teacher"


def test_keyed_and_open_services_score_in_one_run(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    stop, registered = StopFlag(), threading.Event()
    with running_proxy(sockets=SocketSettings(keys=server_keys(tmp_path / "keys"))) as keyed, service(2) as open_port:
        worker = Worker(OffsetEngine(1), backend_port=keyed.backend_port, auth_dir=tmp_path / "keys")
        options = {"register_timeout_s": 10.0, "on_registered": registered.set}
        thread = threading.Thread(target=worker.run, args=(stop,), kwargs=options, daemon=True)
        thread.start()
        try:
            assert registered.wait(timeout=60)
            config = base_config(
                f"{KEY}.route_key=source",
                f"{KEY}.timeout_s=10",
                f"{KEY}.auth_dir={tmp_path}/keys/clients/default",
                f"{KEY}.teachers.keyed=127.0.0.1:{keyed.frontend_port}",
                f"{KEY}.teachers.open.address=127.0.0.1:{open_port}",
                f"{KEY}.teachers.open.auth_dir=''",
            )
            with open_teachers(config, Routes(("keyed", "open"), np.array([0, 1]))) as teachers:
                samples = asyncio.run(teachers.score([pair(uid) for uid in range(4)], 0))
        finally:
            stop.set()
            thread.join(timeout=60)
            stop.close()
    assert [is_scored_by(1 + sample.prompt.row, sample) for sample in samples] == [True] * 4
