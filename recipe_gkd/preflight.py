"""What can be known to be wrong before a single process is started: model folder, tokenizer, data, teachers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recipe_gkd.actor.model_dims import check_fits, read_model_dims
from recipe_gkd.config import Config
from recipe_gkd.config.objective import uses_custom_loss, uses_sampled_token_loss
from recipe_gkd.config.teachers import TEACHER
from recipe_gkd.config.validate import validates
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.model_files import check_tokenizer_files, check_weight_files
from recipe_gkd.rollout.limits import check_engine_fits
from recipe_gkd.rollout.sampling import stop_token_ids
from recipe_gkd.teacher_routing.router import Client
from teacher.fingerprint import count_ids, tokenizer_fingerprint
from teacher.records import TeacherInfo, TeacherSequence

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""A teacher that is there answers in milliseconds, however busy."""


@dataclass(frozen=True)
class Student:
    """The student's folder, as far as the driver needs it."""

    path: Path
    vocab_size: int
    tokenizer: Any
    fingerprint: str
    """Of the tokenizer's vocabulary; see ``teacher.fingerprint``."""
    n_tokens: int
    """Ids of the tokenizer, 0 to n_tokens - 1; what the output layer has beyond, up to ``vocab_size``, is padding."""


def read_student(config: Config) -> Student:
    """Find the student's folder and load its config and tokenizer; :class:`ModelError` tells what is missing."""
    import transformers

    model = config.actor_rollout_ref.model
    path = find_model(model.path)
    shape = read_model_dims(path, trust_remote_code=model.trust_remote_code)
    check_fits(shape, config.actor_rollout_ref.actor.megatron)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if shape.max_positions < longest:
        raise ConfigError(
            f"the student {path} has {shape.max_positions} positions, but data.max_prompt_length + "
            f"data.max_response_length = {longest}; lower those"
        )
    check_engine_fits(shape, config)
    check_weight_files(path)
    if not model.trust_remote_code:  # its tokenizer may have files of any name
        check_tokenizer_files(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    n_tokens = min(count_ids(tokenizer), shape.vocab_size)
    return Student(path, shape.vocab_size, tokenizer, tokenizer_fingerprint(tokenizer), n_tokens)


def with_model_path(config: Config, path: Path) -> Config:
    """The configuration with the folder that a hub name stood for, which is what the workers read."""
    model = replace(config.actor_rollout_ref.model, path=str(path.absolute()))
    return replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, model=model))


def find_model(name: str) -> Path:
    """A folder, or the copy of a hub model that ``hf download`` has put into the local cache."""
    path = Path(name).expanduser()
    if not path.is_dir() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise ModelError(
                f"actor_rollout_ref.model.path={name} is neither a folder (seen from {Path.cwd()}) nor in "
                f"the local hub cache; give a folder, or run: hf download {name}"
            ) from error
    if not (path / "config.json").is_file():
        there = "is not there" if not path.exists() else "has no config.json"
        raise ModelError(
            f"actor_rollout_ref.model.path={name}: {path.absolute()} {there}; expected a Hugging Face model "
            "folder with config.json, tokenizer and safetensors"
        )
    return path


def meet_teachers(clients: Mapping[str, Client], student: Student, config: Config) -> tuple[int, ...]:
    """Ask each teacher what it is, and refuse one that cannot teach this student; the ids that end their turns.

    ``clients``: by the teacher's name.
    """
    ends: set[int] = set()
    for name, client in clients.items():
        info = meet_teacher(name, client, student, config)
        asked = config.actor_rollout_ref.teacher.top_k or info.n_logprobs
        log.info("teacher %s: %s, top %d of %d ids", name, info.model_name, asked, info.n_tokens)
        ends.update(info.eos_token_ids)
    return tuple(sorted(ends))


def check_stop_ids(config: Config, student: Student, of_teachers: Collection[int]) -> frozenset[int]:
    """Return the ids at which a sampled response ends: those of the student's folder, and ``of_teachers``.

    Nothing is checked if the run samples no response.

    Raises:
        ConfigError: There is none, so that each response would run to its limit; or reference responses end with an id
            at which a sampled one goes on: training on them would teach the student never to stop.
    """
    stops = frozenset({*stop_token_ids(str(student.path)), *of_teachers})
    usable = frozenset(token for token in stops if 0 <= token < student.n_tokens)
    if config.gkd.sft_share == 1 and not validates(config):
        return usable
    remedy = f"in {student.path}/generation_config.json"
    if not usable:
        found = f"only {sorted(stops)}, which its tokenizer does not have" if stops else "none"
        raise ConfigError(
            f"a sampled response has no token at which it ends, and each would run to data.max_response_length="
            f"{config.data.max_response_length}: config.json and generation_config.json of the student and of its "
            f"teachers name {found}; set eos_token_id {remedy} to the ids that end a turn"
        )
    own = student.tokenizer.eos_token_id
    if own is None or own in usable:
        return usable
    listed = ", ".join(map(str, sorted(usable | {own})))
    what = (
        f"the tokenizer of {student.path} ends a text with {student.tokenizer.eos_token!r} (id {own}), but sampled "
        f"responses end at {sorted(usable)}"
    )
    if config.gkd.sft_share > 0:
        raise ConfigError(
            f"{what}: gkd.sft_share={config.gkd.sft_share:g} would train on reference responses that end with an id at "
            f"which generation goes on; set eos_token_id {remedy} to [{listed}], or correct eos_token in its "
            "tokenizer_config.json"
        )
    log.warning("%s; if %d ends a turn, too, set eos_token_id %s to [%s]", what, own, remedy, listed)
    return usable


def meet_teacher(name: str, client: Client, student: Student, config: Config) -> TeacherInfo:
    """Raises :class:`ConfigError`, or as the client does."""
    info = client.hello(timeout_s=HELLO_TIMEOUT_S)
    who = f"teacher {name} ({info.model_name})"
    if info.tokenizer_fingerprint != student.fingerprint:
        raise ConfigError(
            f"the teacher's vocabulary does not fit the student's: {who} has {info.n_tokens} ids (tokenizer "
            f"{info.tokenizer_fingerprint}), student {student.path} has {student.n_tokens} (tokenizer "
            f"{student.fingerprint}). The same id must mean the same token in both: choose a teacher and a student of "
            "one family, with the tokenizer files they came with"
        )
    if info.n_tokens < student.n_tokens:
        raise ConfigError(
            f"{who} knows the ids 0 to {info.n_tokens - 1} of the tokenizer, but the student {student.path} answers "
            f"with ids up to {student.n_tokens - 1}, which the teacher would refuse: its output layer, of "
            f"{info.vocab_size}, is too small for its tokenizer; choose a checkpoint that has all of it"
        )
    if foreign := [token for token in info.eos_token_ids if token >= student.n_tokens]:
        raise ConfigError(
            f"{who} ends its turns with {foreign}, but the student {student.path} has only ids 0 to "
            f"{student.n_tokens - 1}; correct eos_token_id in the teacher's generation_config.json"
        )
    gkd, teacher = config.gkd, config.actor_rollout_ref.teacher
    if teacher.top_k is not None and teacher.top_k > info.n_logprobs:
        raise ConfigError(
            f"{TEACHER}.top_k={teacher.top_k}, but {who} returns {info.n_logprobs} ids at most; lower it, set it to "
            "null, or start the teacher with a larger N_LOGPROBS"
        )
    uses_tail = not (uses_sampled_token_loss(gkd) or uses_custom_loss(gkd))
    if (teacher.top_k or info.n_logprobs) == 1 and gkd.tail == "renormalize" and uses_tail:
        raise ConfigError(
            f"gkd.tail=renormalize with a top 1 of {who}: one id, renormalized, has probability 1 on both sides, and "
            f"the gradient is zero; set gkd.tail=bucket, or raise {TEACHER}.top_k or the teacher's N_LOGPROBS"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if info.max_model_len < longest:
        raise ConfigError(
            f"{who} scores at most {info.max_model_len} tokens, but data.max_prompt_length + "
            f"data.max_response_length = {longest}; lower those, or start the teacher with a larger MAX_MODEL_LEN"
        )
    if gkd.distill_temperature != 1:  # not every engine can
        two_tokens = TeacherSequence(np.zeros(2, np.int32), prompt_len=1)
        client.submit([two_tokens], teacher.timeout_s, temperature=gkd.distill_temperature).result()
    return info
