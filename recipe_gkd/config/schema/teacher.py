"""Section ``actor_rollout_ref.teacher``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import MAX_NODES, MAX_STEPS, MAX_TEACHER_WAIT_S
from recipe_gkd.config.schema.fields import STRICT, SourcePath, UserPath, key, null_to_list, timeout
from recipe_gkd.config.schema.unused import (
    NAMED_TEACHERS,
    NO_CACHE,
    NO_HTTP_SERVER,
    NO_REFERENCE_RESPONSES,
    NO_SCORING_WORKERS,
    NO_SERVICE,
    NO_SUPPORT_IDS,
    NO_TEACHER,
    ONLY_STUDENT_SUPPORT,
    RECORDED,
    STUDENT_PROMPTS,
    TEACHER_SUPPORT,
    needs,
    unused_with,
)
from recipe_gkd.errors import ConfigError
from teacher import WireDtype
from teacher.client import MAX_CONNECTIONS

TeacherVocabulary = Literal["equal", "compatible"]
TeacherFailureMode = Literal["fail", "wait", "skip_samples"]
TeacherSupport = Literal["teacher", "student", "union"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherEntry:
    """A named teacher, a value of ``actor_rollout_ref.teacher.teachers``.

    For the other fields, None selects the value of the section ``actor_rollout_ref.teacher``. An empty text or mapping
    means none.
    """

    address: str = key("`host:port` of the teacher's proxy, or URLs of its HTTP servers.")
    auth_dir: UserPath | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None


def _as_urls(value: Any) -> Any:
    return [url.strip() for url in value.split(",")] if isinstance(value, str) else null_to_list(value)


def _as_entry(value: Any) -> Any:
    if isinstance(value, TeacherEntry):
        return value
    if isinstance(value, str):
        return {"address": value}
    names = [field.name for field in dataclasses.fields(TeacherEntry)]
    if not isinstance(value, dict) or "address" not in value or set(value) - set(names):
        raise ConfigError(
            f"got {value!r}; expected host:port, or a mapping with address and any of {', '.join(names[1:])}",
            remedy="correct it",
        )
    return value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """Teacher service, section ``actor_rollout_ref.teacher``."""

    backend: SourcePath = key(
        "Teacher backend. `zmq`: a teacher service. `http`: servers started with `vllm serve` or SGLang. `recorded`: "
        "scores of the reference responses that `python -m recipe_gkd record` has written, without a teacher. `hf`: a "
        "transformers model in the driver process, for small teachers, tests and debugging. `FILE.py:Class`: a class "
        "that implements `recipe_gkd.teachers.backends.TeacherBackend`."
    )
    model_path: UserPath | None = key(
        "Folder of the teacher model for `backend=hf`; passed on to a custom backend. `http`: folder with the "
        "teacher's tokenizer, null: the student's folder; all ids are compared with the server's.",
        refused=[unused_with(lambda config: config.actor_rollout_ref.teacher.backend, "zmq", "hf")],
    )
    url: Annotated[list[str], BeforeValidator(_as_urls)] = key(
        "Base URLs of the servers of the teacher for `backend=http`, such as `http://10.0.0.1:8000`: one, a list, or "
        "several separated by commas, which all serve the same model.",
        refused=[NO_HTTP_SERVER],
    )
    api_key_env: str | None = key(
        "Name of the environment variable with the API key of the HTTP servers. null: no key.",
        refused=[NO_HTTP_SERVER],
    )
    path: UserPath | None = key(
        "Folder of a recording of the reference responses' scores. `backend=recorded` has no others; with another "
        "backend they are read from it, and sampled responses are scored by the teacher.",
        unused=[NO_REFERENCE_RESPONSES, needs(lambda config: config.gkd.sft_target, "teacher")],
    )
    served_model_name: str | None = key(
        "Name of the teacher among the models of the HTTP servers. null: the only model that is no adapter.",
        refused=[NO_HTTP_SERVER],
    )
    server_ip: str = key("Address of the teacher's proxy.", unused=[NO_TEACHER, NAMED_TEACHERS], refused=[NO_SERVICE])
    server_port: int = key(
        "Front-end port of the teacher's proxy (`PROXY_FRONTEND_PORT`).",
        unused=[NO_TEACHER, NAMED_TEACHERS],
        refused=[NO_SERVICE],
        ge=1,
        le=65535,
    )
    teachers: dict[str, Annotated[TeacherEntry, BeforeValidator(_as_entry)]] = key(
        "Several named teachers, as name -> `host:port`. They replace the teacher at `server_ip`, which has the name "
        "`default`. Command line, once per teacher: `actor_rollout_ref.teacher.teachers.math=10.0.0.1:15555`. Instead "
        "of `host:port`, a mapping with `address` and any of `auth_dir`, `prompt_template`, `system_prompt` and "
        "`apply_chat_template_kwargs`, which replace this section's for one teacher; empty: none. With `backend=http` "
        "the address is a URL, or several separated by commas."
    )
    route_key: str | None = key(
        "Column with the name of each prompt's teacher. Dots select a field of a structure. Required with more than "
        "one teacher."
    )
    prompt_template: str | None = key(
        "Text that the teacher sees in place of the prompt's last user message, or of a prompt that is a string. "
        "`{prompt}` is the replaced text, any other field a column: `{prompt}\\n\\nSolution: {ground_truth}`. "
        "Dots select a field of a structure; `{{` and `}}` are braces. null: the teacher sees the student's prompt.",
        unused=[NO_TEACHER],
    )
    system_prompt: str | None = key(
        "System message of the teacher's prompts that have none. null: the student's (`data.system_prompt`); empty: "
        "none."
    )
    apply_chat_template_kwargs: dict[str, Any] | None = key(
        "Arguments of the chat template for the teacher's prompts. null: the student's "
        "(`data.apply_chat_template_kwargs`)."
    )
    allow_prompt_mismatch: bool = key(
        "Accept prompts of student and teacher whose generation prompts differ, such as one with an opened `<think>`.",
        unused=[STUDENT_PROMPTS],
    )
    vocabulary: TeacherVocabulary = key(
        "Accepted vocabularies of teachers. `equal`: the student's. `compatible`: also the student's plus further "
        "tokens at its end. The teacher excludes them before the softmax, so that its distributions are over the "
        "student's tokens.",
        unused=[NO_TEACHER],
    )
    n_server_workers: int | None = key(
        "Total number of teacher workers over all teachers, which determines the number of requests per batch. null: "
        "the number of workers that the services have at the start of the run; 1 for other backends.",
        unused=[NO_TEACHER],
        ge=1,
        le=MAX_NODES,
    )
    num_microbatches: int | None = key(
        "Number of requests per teacher worker that a batch is split into. Higher values start scoring earlier, and "
        "have more overhead per request. null: 8.",
        unused=[NO_TEACHER],
        ge=1,
        le=1 << 16,
    )
    timeout_s: float = timeout("one request to the teacher, in seconds.")
    top_k: int | None = key(
        "Number of token ids per position to request. null: all that the teacher returns.",
        unused=[NO_TEACHER, ONLY_STUDENT_SUPPORT],
        ge=1,
        le=1 << 24,
    )
    support: TeacherSupport = key(
        "Ids of a position that the divergence compares one by one; all others are the tail. `teacher`: the teacher's "
        "top k, for forward KL. `student`: the student's `student_top_k` likeliest ids when it sampled the token, at "
        "which the teacher returns its log-probabilities, for reverse KL. `union`: both. Responses that the student "
        "has not sampled have the teacher's top k.",
        unused=[NO_TEACHER],
        refused=[NO_SUPPORT_IDS],
    )
    student_top_k: int = key(
        "Number of the student's likeliest ids in the support, at most the service's `N_LOGPROBS`. Rollout engines "
        "return them with each token.",
        unused=[NO_TEACHER, TEACHER_SUPPORT],
        ge=1,
        le=1 << 16,
    )
    wire_dtype: WireDtype = key(
        "Data type of top-k log-probabilities in transit. `float16` saves a quarter of the bytes and keeps 11 bits of "
        "precision; use it for teachers on other hosts.",
        unused=[NO_TEACHER],
        refused=[NO_SERVICE],
    )
    auth_dir: UserPath | None = key(
        "Folder with the CURVE keys of this client and the public key of the server. null: no authentication.",
        unused=[NO_TEACHER],
        refused=[NO_SERVICE],
    )
    n_connections: int | None = key(
        "Number of connections to each teacher service. Each has its own threads, which matters for encryption. "
        "null: 4 with `auth_dir`, else 1. `backend=http`: number of open requests at each server, of each scoring "
        "worker; null: 64.",
        refused=[NO_SCORING_WORKERS],
        ge=1,
        le=MAX_CONNECTIONS,
    )
    scoring_workers_per_node: int = key(
        "Number of processes on each node of the actor pool that receive the teachers' results, which go from the "
        "service to the node that trains on them, not through the driver. More than one if one core cannot decode as "
        "fast as the network delivers, or as HTTP servers do. Used by `backend=zmq` and `http`.",
        unused=[NO_TEACHER],
        refused=[NO_SCORING_WORKERS],
        ge=1,
        le=MAX_CONNECTIONS,
    )
    max_rows_gb: float | None = key(
        "Memory in GB, over all nodes of the actor pool, that the teachers' rows of batches may use until the batches "
        "are trained on. Generation of the next batch waits for it. One batch is always allowed. null: the rows "
        "that fill half of the object store of the node that gets most of them.",
        unused=[NO_TEACHER],
        gt=0,
        le=MAX_STEPS,
    )
    cache_dir: UserPath | None = key(
        "Folder of scores that are kept for later runs: a response that the same teacher has scored before is not sent "
        "to it again. On a cluster, a folder on each node or on a shared file system. null: nothing is kept.",
        unused=[NO_TEACHER],
        refused=[RECORDED],
    )
    cache_gb: float = key(
        "Maximum size of `cache_dir` in GB. If it is full, the scores that were not used for the longest time are "
        "deleted.",
        unused=[NO_CACHE],
        gt=0,
        le=MAX_STEPS,
    )
    on_failure: TeacherFailureMode = key(
        "Reaction to a request that fails or exceeds `timeout_s`. `fail`: the run ends. `wait`: the request is "
        "repeated for up to `max_wait_s`; a rejected request ends the run. `skip_samples`: its samples stay in the "
        "batch without a distillation loss, up to `max_skipped_samples`.",
        unused=[NO_TEACHER],
    )
    max_wait_s: float = timeout(
        "all retries of one request, in seconds, from its first failure. After it the run ends. Used if `on_failure` "
        "is `wait`.",
        MAX_TEACHER_WAIT_S,
        unused=[needs(lambda config: config.actor_rollout_ref.teacher.on_failure, "wait")],
    )
    max_skipped_samples: int = key(
        "Number of skipped samples above which the run ends. Resumed runs continue the count. Used if `on_failure` is "
        "`skip_samples`.",
        unused=[needs(lambda config: config.actor_rollout_ref.teacher.on_failure, "skip_samples")],
        ge=0,
        le=MAX_STEPS,
    )
    sleep_between_batches: bool = key(
        "Let the teacher service release its GPUs except while it scores, so that teacher, rollout and actor can share "
        "them. Needs `trainer.scheduler=sync`, and a service that scores for this run only.",
        unused=[NO_TEACHER],
    )
