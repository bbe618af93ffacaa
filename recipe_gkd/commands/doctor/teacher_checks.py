"""Checks of the teachers: connection, vocabulary, limits, and one scored request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from recipe_gkd.commands.doctor.data_checks import MAX_ROWS
from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.commands.doctor.machine_checks import connection_error
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import uses_teacher
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.prompt_settings import prompt_settings
from recipe_gkd.config.teachers import addresses, names
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import check_stop_ids, check_teacher, check_teacher_prompts, two_tokens
from recipe_gkd.teachers.backends import TeacherBackend, score_now, scores_any_sequence
from recipe_gkd.teachers.cache.scores import ScoreCache
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.prompts import make_teacher_prompts
from recipe_gkd.teachers.router import Teachers, open_teachers
from recipe_gkd.teachers.routes import Routes, read_routes
from teacher.client import TeacherClient
from teacher.errors import TeacherError
from teacher.records import TeacherInfo

_SCORE_TIMEOUT_S = 30.0


def teacher_findings(config: Config, data_set: DataSet | None, student: Student) -> Iterator[Finding]:
    """Check each teacher of the run, and then the ids at which a response ends.

    Args:
        data_set: Training data; None if it cannot be read. All teachers are checked then.
    """
    if not uses_teacher(config.gkd):
        yield Finding("teacher", "skipped", "the run needs none (gkd.enable_teacher)")
        return
    infos: list[TeacherInfo] = []

    def check() -> Iterator[Finding]:
        with open_teachers(config, _routes(config, data_set)) as teachers:
            for name, client in teachers.sources.items():
                yield from findings_of(f"teacher {name}", partial(_check, name, client, student, config, infos))
            if infos and config.actor_rollout_ref.teacher.cache_dir is not None:
                yield from findings_of("cache of scores", partial(_cache_findings, config, teachers))
            if infos and data_set is not None:
                prompts_check = partial(_prompt_findings, config, data_set, student, teachers)
                yield from findings_of("teacher prompts", prompts_check)

    yield from findings_of("teacher", check)
    if infos:
        ids = {token for info in infos for token in info.eos_token_ids}
        yield from findings_of("end of response", lambda: [_stop_finding(config, student, ids)])


def _routes(config: Config, data_set: DataSet | None) -> Routes:
    if data_set is not None:
        return read_routes(data_set, config)
    known = names(config.actor_rollout_ref.teacher)
    return Routes(known, np.arange(len(known)))


def _check(
    name: str, client: TeacherBackend, student: Student, config: Config, infos: list[TeacherInfo]
) -> Iterator[Finding]:
    label = f"teacher {name}"
    try:
        info = check_teacher(name, client, student, config)
        infos.append(info)
        if not config.actor_rollout_ref.teacher.sleep_between_batches and scores_any_sequence(client):
            score_now(name, client, [two_tokens(config)], config, _SCORE_TIMEOUT_S)
    except TeacherError as error:
        yield Finding(label, "problem", f"{error}{_hint(name, client, config)}")
        return
    top_k = config.actor_rollout_ref.teacher.top_k or info.n_logprobs
    workers = f"{info.n_workers} worker{'s' * (info.n_workers != 1)}"
    is_equal = info.tokenizer_fingerprint == student.fingerprint
    further = "" if is_equal else " and further tokens, which are excluded"
    yield Finding(
        label, "ok",
        f"{info.model_name}: {workers}, at most {info.max_model_len} tokens, top {top_k} of {info.n_logprobs}, the "
        f"student's vocabulary{further}",
    )  # fmt: skip


def _cache_findings(config: Config, teachers: Teachers) -> Iterator[Finding]:
    """Open the caches of the teachers, which creates their folders."""
    for name, cache in open_caches(config, teachers.clients).items():
        folder = ScoreCache(cache).open()
        limit = f"cache_dir has at most {config.actor_rollout_ref.teacher.cache_gb:g} GB"
        yield Finding("cache of scores", "ok", f"of teacher {name}: {folder}; {limit}")


def _prompt_findings(config: Config, data_set: DataSet, student: Student, teachers: Teachers) -> list[Finding]:
    """Render the prompts of teachers that do not see the student's, for the first rows."""
    if not any(prompt_settings(config.actor_rollout_ref.teacher, config.data).values()):
        return []
    some = data_set[:MAX_ROWS]
    data = PromptData(some, replace(config.data, filter_overlong_prompts=True), student.tokenizer)
    prompts = make_teacher_prompts(data, read_routes(some, config), config, student.tokenizer)
    if prompts is None:
        return []
    check_teacher_prompts(teachers.clients, prompts.longest, config)
    longest = ", ".join(f"{name} {length}" for name, length in prompts.longest.items())
    return [Finding("teacher prompts", "ok", f"longest of {len(data)} rendered prompts, in tokens: {longest}")]


def _hint(name: str, client: TeacherBackend, config: Config) -> str:
    """Return the result of a plain TCP connection to a teacher service, as an addition to its error."""
    if not isinstance(client, TeacherClient):
        return ""
    host, port = addresses(config.actor_rollout_ref.teacher)[name]
    reason = connection_error(host, port)
    if reason is not None:
        return f" ({host}:{port} accepts no connection: {reason})"
    return (
        f". A program accepts connections at {host}:{port}: if it is the teacher, run `python -m teacher status` "
        f"there; else another program uses the port, so correct {TEACHER}.server_port"
    )


def _stop_finding(config: Config, student: Student, teacher_ids: set[int]) -> Finding:
    usable = check_stop_ids(config, student, sorted(teacher_ids))
    return Finding("end of response", "ok", f"sampled responses end at {sorted(usable)}")
