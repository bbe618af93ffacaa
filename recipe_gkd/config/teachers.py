"""Names, addresses, keys and prompt settings of the teachers of a run, and their validation."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator
from urllib.parse import urlsplit

from recipe_gkd.config.backend_class import load_backend_class
from recipe_gkd.config.conditions import has_recorded_references
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.prompt_settings import DEFAULT
from recipe_gkd.config.prompt_template import template_problem
from recipe_gkd.config.schema import Config, TeacherConfig
from recipe_gkd.errors import ConfigError

_N_ENCRYPTED_CONNECTIONS = 4
_DEFAULT_MICROBATCHES = 8
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ADDRESS = re.compile(r"(?P<host>[^\s:]+):(?P<port>[0-9]{1,5})")


def addresses(teacher: TeacherConfig) -> dict[str, tuple[str, int]]:
    """Return host and port of each teacher by name, in the same order in every process of a run.

    Args:
        teacher: A validated configuration.
    """
    if not teacher.teachers:
        return {DEFAULT: (teacher.server_ip, teacher.server_port)}
    return {name: _host_and_port(entry.address) for name, entry in teacher.teachers.items()}


def auth_dirs(teacher: TeacherConfig) -> dict[str, str | None]:
    """Return the folder of the keys for each teacher by name, None for a service without keys."""
    if not teacher.teachers:
        return {DEFAULT: teacher.auth_dir}
    shared = teacher.auth_dir
    return {
        name: (shared if entry.auth_dir is None else entry.auth_dir) or None for name, entry in teacher.teachers.items()
    }


def urls(teacher: TeacherConfig) -> dict[str, tuple[str, ...]]:
    """Return the base URLs of the servers of each teacher by name, for ``backend=http``."""
    if not teacher.teachers:
        return {DEFAULT: tuple(_base_url(url) for url in teacher.url)}
    return {name: tuple(_base_url(url) for url in entry.address.split(",")) for name, entry in teacher.teachers.items()}


def _base_url(url: str) -> str:
    """Return a URL without surrounding spaces, a trailing slash and ``/v1``."""
    return url.strip().rstrip("/").removesuffix("/v1")


def hosts(teacher: TeacherConfig) -> list[str]:
    """Return the hosts of all teachers."""
    if teacher.backend == "http":
        return [urlsplit(url).hostname or "" for of_teacher in urls(teacher).values() for url in of_teacher]
    return [host for host, _ in addresses(teacher).values()]


def services(teacher: TeacherConfig) -> dict[str, Hashable]:
    """Return what identifies the service of each teacher by name. Teachers of one service share a client."""
    if teacher.backend == "http":
        return dict(urls(teacher))
    keys = auth_dirs(teacher)
    return {name: (*address, keys[name]) for name, address in addresses(teacher).items()}


def n_connections(teacher: TeacherConfig, auth_dir: str | None) -> int:
    """Return the number of connections to a teacher service whose keys are in ``auth_dir``."""
    if teacher.n_connections is not None:
        return teacher.n_connections
    return 1 if auth_dir is None else _N_ENCRYPTED_CONNECTIONS


def requests_per_batch(teacher: TeacherConfig) -> int:
    """Return the maximum number of requests that a batch is split into. An unknown number of workers counts as 1."""
    return (teacher.n_server_workers or 1) * (teacher.num_microbatches or _DEFAULT_MICROBATCHES)


def names(teacher: TeacherConfig) -> tuple[str, ...]:
    """Return the names of the teachers in the order of :func:`addresses`. A teacher's number is its index."""
    return tuple(teacher.teachers) or (DEFAULT,)


def teacher_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each invalid value of the teacher section, with the value to change."""
    teacher = config.actor_rollout_ref.teacher
    yield from _backend_problems(teacher)
    if teacher.backend == "http":
        yield from _http_problems(config)
    if teacher.backend == "recorded":
        yield from _recording_problems(config)
    if has_recorded_references(config) and len(names(teacher)) > 1:
        yield ConfigError(
            f"{TEACHER}.path is the recording of one teacher, but {TEACHER}.teachers has {len(names(teacher))}",
            remedy=f"set {TEACHER}.path=null, so that the teachers score the reference responses",
            keys=(f"{TEACHER}.path", f"{TEACHER}.teachers"),
        )
    yield from _template_problems(teacher)
    for name, entry in teacher.teachers.items():
        if not _NAME.fullmatch(name):
            yield ConfigError(
                f"{TEACHER}.teachers: got a teacher with the name {name!r}; names are part of metric names and may "
                "contain only letters, digits, _ and -",
                remedy="rename it",
                keys=(f"{TEACHER}.teachers.{name}",),
            )
        if teacher.backend != "http" and not _is_address(entry.address):
            yield ConfigError(
                f"{TEACHER}.teachers.{name}={entry.address}: expected host:port, such as 10.0.0.1:15555",
                remedy="correct it",
                keys=(f"{TEACHER}.teachers.{name}.address",),
            )
    if len(teacher.teachers) > 1 and teacher.route_key is None:
        yield ConfigError(
            f"{TEACHER}.teachers has {', '.join(teacher.teachers)}, but no key selects a teacher for each prompt",
            remedy=f"set {TEACHER}.route_key to the column of the data that names each prompt's teacher",
            keys=(f"{TEACHER}.teachers", f"{TEACHER}.route_key"),
        )
    if teacher.route_key is not None and not teacher.teachers:
        yield ConfigError(
            f"{TEACHER}.route_key={teacher.route_key} without {TEACHER}.teachers: there is one teacher, at server_ip",
            remedy="name the teachers, or set route_key=null",
            keys=(f"{TEACHER}.route_key", f"{TEACHER}.teachers"),
        )


def _backend_problems(teacher: TeacherConfig) -> Iterator[ConfigError]:
    backend = teacher.backend
    if backend in ("zmq", "http"):
        return
    if teacher.teachers:
        yield ConfigError(
            f"{TEACHER}.backend={backend} is one teacher",
            remedy=f"leave {TEACHER}.teachers out, or set backend=zmq",
            keys=(f"{TEACHER}.backend", f"{TEACHER}.teachers"),
        )
    if backend == "recorded":
        return
    if backend != "hf":
        try:
            load_backend_class(backend)
        except ConfigError as error:
            yield error
        return
    if teacher.model_path is None:
        yield ConfigError(
            f"{TEACHER}.backend=hf needs {TEACHER}.model_path, the folder of the teacher model",
            keys=(f"{TEACHER}.backend", f"{TEACHER}.model_path"),
        )


def _http_problems(config: Config) -> Iterator[ConfigError]:
    teacher = config.actor_rollout_ref.teacher
    if not teacher.teachers and not teacher.url:
        yield ConfigError(
            f"{TEACHER}.backend=http needs {TEACHER}.url, the address of a vLLM or SGLang server",
            remedy="set it, such as http://10.0.0.1:8000",
            keys=(f"{TEACHER}.backend", f"{TEACHER}.url"),
        )
    if teacher.teachers and teacher.url:
        yield ConfigError(
            f"{TEACHER}.url={','.join(teacher.url)} and {TEACHER}.teachers are both set",
            remedy=f"give the URLs in {TEACHER}.teachers only",
            keys=(f"{TEACHER}.url", f"{TEACHER}.teachers"),
        )
    for name, of_teacher in urls(teacher).items():
        key = f"{TEACHER}.teachers.{name}.address" if teacher.teachers else f"{TEACHER}.url"
        for url in of_teacher:
            if not _is_url(url):
                yield ConfigError(
                    f"{key}={url}: expected http://HOST:PORT or https://HOST, such as http://10.0.0.1:8000",
                    remedy="correct it",
                    keys=(key,),
                )
    if config.gkd.distill_temperature != 1:
        yield ConfigError(
            f"gkd.distill_temperature={config.gkd.distill_temperature:g} with {TEACHER}.backend=http: the servers "
            "return log-probabilities at temperature 1",
            remedy=f"set it to 1, or use {TEACHER}.backend=zmq",
            keys=("gkd.distill_temperature", f"{TEACHER}.backend"),
        )
    if teacher.vocabulary != "equal":
        yield ConfigError(
            f"{TEACHER}.vocabulary={teacher.vocabulary} with {TEACHER}.backend=http: a server cannot exclude tokens "
            "from its distributions",
            remedy=f"set it to equal, or use {TEACHER}.backend=zmq",
            keys=(f"{TEACHER}.vocabulary", f"{TEACHER}.backend"),
        )
    if teacher.api_key_env is not None and not os.environ.get(teacher.api_key_env):
        yield ConfigError(
            f"{TEACHER}.api_key_env={teacher.api_key_env}: the environment variable is not set",
            remedy=f"export {teacher.api_key_env}=KEY before the start",
            keys=(f"{TEACHER}.api_key_env",),
        )


def _recording_problems(config: Config) -> Iterator[ConfigError]:
    teacher, backend = config.actor_rollout_ref.teacher, f"{TEACHER}.backend"
    if teacher.path is None:
        yield ConfigError(
            f"{backend}=recorded needs {TEACHER}.path, the folder of a recording",
            remedy="make one with python -m recipe_gkd record",
            keys=(backend, f"{TEACHER}.path"),
        )
    if config.gkd.sft_share != 1 or config.gkd.sft_target != "teacher":
        yield ConfigError(
            f"{backend}=recorded has the scores of reference responses only, but gkd.sft_share="
            f"{config.gkd.sft_share:g} and gkd.sft_target={config.gkd.sft_target}",
            remedy="set gkd.sft_share=1 and gkd.sft_target=teacher, or use another backend for sampled responses",
            keys=("gkd.sft_share", "gkd.sft_target", backend),
        )
    if config.trainer.val_kl:
        yield ConfigError(
            f"trainer.val_kl=true with {backend}=recorded: responses of a validation are sampled, and have no scores",
            remedy="set trainer.val_kl=null",
            keys=("trainer.val_kl", backend),
        )


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _template_problems(teacher: TeacherConfig) -> Iterator[ConfigError]:
    templates = {f"{TEACHER}.prompt_template": teacher.prompt_template}
    templates |= {
        f"{TEACHER}.teachers.{name}.prompt_template": entry.prompt_template for name, entry in teacher.teachers.items()
    }
    for key, template in templates.items():
        if template and (problem := template_problem(template)):
            yield ConfigError(f"{key}={template!r:.200}: {problem}", remedy="write {{ and }} for braces", keys=(key,))


def _is_address(address: str) -> bool:
    found = _ADDRESS.fullmatch(address)
    return found is not None and 1 <= int(found["port"]) <= 65535


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
