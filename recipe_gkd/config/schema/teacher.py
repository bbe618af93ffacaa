"""Section ``actor_rollout_ref.teacher``."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import MAX_NODES, MAX_STEPS, MAX_TEACHER_WAIT_S
from recipe_gkd.config.schema.fields import STRICT, key, timeout
from teacher import WireDtype
from teacher.client import MAX_CONNECTIONS

TeacherFailureMode = Literal["fail", "wait", "skip_samples"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """Teacher service, section ``actor_rollout_ref.teacher``."""

    backend: str = key(
        "Teacher backend. `zmq`: a teacher service. `hf`: a transformers model in the driver process, for small "
        "teachers, tests and debugging. `FILE.py:Class`: a class that implements "
        "`recipe_gkd.teacher_routing.TeacherBackend`."
    )
    model_path: str | None = key("Folder of the teacher model for `backend=hf`; passed on to a custom backend.")
    server_ip: str = key("Address of the teacher's proxy.")
    server_port: int = key("Front-end port of the teacher's proxy (`PROXY_FRONTEND_PORT`).", ge=1, le=65535)
    teachers: dict[str, str] = key(
        "Several named teachers, as name -> `host:port`. They replace the teacher at `server_ip`, which has the name "
        "`default`. Command line, once per teacher: `actor_rollout_ref.teacher.teachers.math=10.0.0.1:15555`."
    )
    route_key: str | None = key(
        "Column with the name of each prompt's teacher. Dots select a field of a structure. Required with more than "
        "one teacher."
    )
    n_server_workers: int = key("Total number of teacher workers over all teachers.", ge=1, le=MAX_NODES)
    num_microbatches: int = key(
        "Number of requests per teacher worker that a batch is split into. Higher values start scoring earlier, and "
        "have more overhead per request.",
        ge=1,
        le=1 << 16,
    )
    timeout_s: float = timeout("one request to the teacher, in seconds.")
    top_k: int | None = key(
        "Number of token ids per position to request. null: all that the teacher returns.", ge=1, le=1 << 24
    )
    wire_dtype: WireDtype = key(
        "Data type of top-k log-probabilities in transit. `float16` saves a quarter of the bytes and keeps 11 bits of "
        "precision; use it for teachers on other hosts."
    )
    auth_dir: str | None = key(
        "Folder with the CURVE keys of this client and the public key of the server. null: no authentication."
    )
    n_connections: int | None = key(
        "Number of connections to each teacher service. Each has threads of its own, which matters for encryption. "
        "null: 4 with `auth_dir`, else 1.",
        ge=1,
        le=MAX_CONNECTIONS,
    )
    on_failure: TeacherFailureMode = key(
        "Reaction to a request that fails or exceeds `timeout_s`. `fail`: the run ends. `wait`: the request is "
        "repeated for up to `max_wait_s`; a rejected request ends the run. `skip_samples`: its samples stay in the "
        "batch without a distillation loss, up to `max_skipped_samples`."
    )
    max_wait_s: float = timeout(
        "all retries of one request, in seconds, from its first failure. After it the run ends. Used if `on_failure` "
        "is `wait`.",
        MAX_TEACHER_WAIT_S,
    )
    max_skipped_samples: int = key(
        "Number of skipped samples above which the run ends. Resumed runs continue the count. Used if `on_failure` is "
        "`skip_samples`.",
        ge=0,
        le=MAX_STEPS,
    )
    sleep_between_batches: bool = key(
        "Let the teacher service release its GPUs except while it scores, so that teacher, rollout and actor can share "
        "them. Needs `trainer.scheduler=sync`, and a service that scores for this run only."
    )
