"""What can be known to be wrong before a single process is started: model folder, tokenizer, data, teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recipe_gkd.actor.shape import check_fits, read_shape
from recipe_gkd.config import Config
from recipe_gkd.config.objective import SAMPLED
from recipe_gkd.errors import ConfigError, ModelError
from teacher.client import TeacherClient
from teacher.fingerprint import tokenizer_fingerprint
from teacher.records import TeacherInfo, TeacherSequence

HELLO_TIMEOUT_S = 10.0
"""A teacher that is there answers in milliseconds, however busy."""
SCORE_TIMEOUT_S = 30.0
"""Of two tokens, which wait for those that a busy teacher has."""


@dataclass(frozen=True)
class Student:
    """The student's folder, as far as the driver needs it."""

    path: Path
    vocab_size: int
    tokenizer: Any
    fingerprint: str
    """Of the tokenizer's vocabulary; see ``teacher.fingerprint``."""


def read_student(config: Config) -> Student:
    """Find the student's folder and load its config and tokenizer; :class:`ModelError` tells what is missing."""
    import transformers

    model = config.actor_rollout_ref.model
    path = find_model(model.path)
    shape = read_shape(path, trust_remote_code=model.trust_remote_code)
    check_fits(shape, config.actor_rollout_ref.actor.megatron)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if shape.max_positions < longest:
        raise ConfigError(
            f"the student {path} has {shape.max_positions} positions, but data.max_prompt_length + "
            f"data.max_response_length = {longest}; lower those"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    return Student(path, shape.vocab_size, tokenizer, tokenizer_fingerprint(tokenizer))


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


def meet_teacher(client: TeacherClient, student: Student, config: Config) -> TeacherInfo:
    """Ask the teacher what it is, and refuse one that cannot teach this student."""
    info = client.hello(timeout_s=HELLO_TIMEOUT_S)
    if info.tokenizer_fingerprint != student.fingerprint:
        raise ConfigError(
            f"the teacher's vocabulary does not fit the student's: teacher {info.model_name} has {info.vocab_size} ids "
            f"(tokenizer {info.tokenizer_fingerprint}), student {student.path} has {student.vocab_size} (tokenizer "
            f"{student.fingerprint}). The same id must mean the same token in both: choose a teacher and a student of "
            "one family, with the tokenizer files they came with"
        )
    if foreign := [token for token in info.eos_token_ids if token >= student.vocab_size]:
        raise ConfigError(
            f"the teacher {info.model_name} ends its turns with {foreign}, but the student {student.path} has only "
            f"ids 0 to {student.vocab_size - 1}; correct eos_token_id in the teacher's generation_config.json"
        )
    gkd = config.gkd
    if info.n_logprobs == 1 and gkd.tail == "renormalise" and gkd.distill_loss_type not in SAMPLED:
        raise ConfigError(
            f"gkd.tail=renormalise with a teacher that returns its top 1 ({info.model_name}): one id, renormalised, "
            "has probability 1 on both sides, and the gradient is zero; set gkd.tail=bucket, or start the "
            "teacher with a larger N_LOGPROBS"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if info.max_model_len < longest:
        raise ConfigError(
            f"the teacher scores at most {info.max_model_len} tokens, but data.max_prompt_length + "
            f"data.max_response_length = {longest}; lower those, or start the teacher with a larger MAX_MODEL_LEN"
        )
    if gkd.distill_temperature != 1:  # not every engine can
        two_tokens = TeacherSequence(np.zeros(2, np.int32), prompt_len=1)
        client.submit([two_tokens], SCORE_TIMEOUT_S, temperature=gkd.distill_temperature).result()
    return info
