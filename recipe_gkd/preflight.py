"""Checks of the model folder, the tokenizer and the teachers before any process starts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipe_gkd.actor.megatron.layout_checks import ensure_heads_fit_context, ensure_layout_fits
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.megatron.transformer_impl import impl_setting
from recipe_gkd.actor.routing_checks import check_routing_replay
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.actor.student_dims import load_hf_config
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import (
    reference_setting,
    runs_validation,
    trains_on_references,
    uses_custom_loss,
    uses_sampled_token_loss,
    weights_column,
)
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.objective import max_scored_tokens
from recipe_gkd.config.prompt_settings import prompt_settings
from recipe_gkd.config.support import Support
from recipe_gkd.config.teachers import names
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet
from recipe_gkd.data.weights import read_weights
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.model_files import Student, check_tied_output_layer, check_weight_files, find_model, load_tokenizer
from recipe_gkd.rollout.limits import check_engine_fits
from recipe_gkd.rollout.sampling import stop_token_ids
from recipe_gkd.teachers.backends import TeacherBackend, hello_now, score_now, scores_any_sequence
from recipe_gkd.teachers.prompts import make_teacher_prompts
from recipe_gkd.teachers.recorded.layout import PATH_KEY
from recipe_gkd.teachers.recorded.teacher import RecordedTeacher
from recipe_gkd.teachers.router import RECORDING
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.vocabularies import check_vocabulary
from teacher.common.fingerprint import count_ids, tokenizer_fingerprint
from teacher.records import TeacherInfo, TeacherSequence

log = logging.getLogger(__name__)


def read_student(config: Config) -> Student:
    """Find the student's model folder, check its files, and load its config and tokenizer.

    The metric names of a custom loss are checked first, because this needs neither model nor data.

    Raises:
        ModelError: The folder or one of its files is missing or unusable.
        ConfigError: The model does not fit the configuration, or a metric of the custom loss has a name in use.
    """
    check_metric_names(config)
    model = config.actor_rollout_ref.model
    path = find_model(model.path)
    dims = read_student_dims(path, config)
    if isinstance(dims, ModelDims):
        _check_megatron_layout(dims, config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if dims.max_positions < longest:
        raise ConfigError(
            f"the student {path} has {dims.max_positions} positions, but data.max_prompt_length + "
            f"data.max_response_length = {longest}",
            remedy="lower one of them",
            keys=("data.max_prompt_length", "data.max_response_length"),
        )
    check_engine_fits(dims, config)
    check_routing_replay(dims, config)
    check_weight_files(path)
    if load_hf_config(path, trust_remote_code=model.trust_remote_code).get_text_config().tie_word_embeddings:
        check_tied_output_layer(path)
    tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    n_tokens = min(count_ids(tokenizer), dims.vocab_size)
    return Student(path, dims.vocab_size, tokenizer, tokenizer_fingerprint(tokenizer), n_tokens)


def _check_megatron_layout(dims: ModelDims, config: Config) -> None:
    actor = config.actor_rollout_ref.actor
    megatron = replace(actor.megatron, transformer_impl=impl_setting(actor))
    ensure_layout_fits(dims, megatron)
    if config.trainer.device == "cpu" or megatron.transformer_impl == "local":
        ensure_heads_fit_context(dims, megatron)  # otherwise the worker checks it, when it has chosen the kernel
    if actor.lora.rank:
        from recipe_gkd.actor.megatron.lora_table import adapted_weights  # imports torch

        adapted_weights(dims, actor.lora)  # refuses names of no layer
    if megatron.override_transformer_config or megatron.override_ddp_config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron lists packages that it does not find
            from recipe_gkd.actor.megatron.model import check_overrides  # imports Megatron, which takes seconds
        check_overrides(dims, megatron, config.trainer.device)


def check_metric_names(config: Config) -> None:
    """Check the names of the metrics of a custom loss, if the configuration has one.

    Raises:
        ConfigError: A metric has the name of another metric.
    """
    if uses_custom_loss(config.gkd):
        from recipe_gkd.actor.objective.loss_metrics import sum_names  # imports torch

        sum_names(config.gkd, names(config.actor_rollout_ref.teacher))


def with_model_path(config: Config, path: Path) -> Config:
    """Return the configuration with ``path`` as the student's model, so that workers need no access to the hub."""
    model = replace(config.actor_rollout_ref.model, path=str(path.absolute()))
    return replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, model=model))


def check_teachers(clients: Mapping[str, TeacherBackend], student: Student, config: Config) -> tuple[int, ...]:
    """Check that every teacher can teach this student.

    Returns:
        Ids at which any teacher ends a turn, in ascending order.

    Raises:
        ConfigError: A teacher does not fit the student or the configuration.
        TeacherError: A teacher cannot be reached, or refuses a request.
    """
    end_ids: set[int] = set()
    sizes: dict[str, int] = {}
    for name, client in clients.items():
        info = check_teacher(name, client, student, config)
        sizes[name] = top_k = config.actor_rollout_ref.teacher.top_k or info.n_logprobs
        log.info("teacher %s: %s, top %d of %d ids", name, info.model_name, top_k, info.n_tokens)
        end_ids.update(info.eos_token_ids)
    if RECORDING in sizes and len(set(sizes.values())) > 1:
        log.warning(
            "the recording has the top %d, the teacher the top %d, so the losses of their responses have different "
            "tails; set %s.top_k=%d",
            sizes[RECORDING], max(sizes.values()), TEACHER, min(sizes.values()),
        )  # fmt: skip
    return tuple(sorted(end_ids))


def check_recorded_prompts(recording: RecordedTeacher | None, data: PromptData) -> None:
    """Check that a recording is of these prompts. Log a warning if it is of a part.

    Args:
        recording: Scores of the reference responses, if there is a recording.
        data: Prompts of the training, with those of the teacher.

    Raises:
        ConfigError: It has none of them.
    """
    if recording is None:
        return
    prompts = (data.prompt(index, index) for index in range(len(data)))
    missing = [prompt.row for prompt in prompts if not recording.has_prompt(prompt.ids_for_teacher)]
    if len(missing) == len(data):
        raise ConfigError(
            f"the recording at {PATH_KEY} has no response to any of the {len(data)} prompts of {data.name}",
            remedy="record these data, with the same tokenizer, chat template and teacher prompt",
            keys=(PATH_KEY,),
        )
    if missing:
        log.warning(
            "the recording at %s has no response to %d of the %d prompts of %s, the first is row %d; a step that needs "
            "one of them ends the run",
            PATH_KEY, len(missing), len(data), data.name, missing[0],
        )  # fmt: skip


def find_stop_ids(student: Student, teacher_ids: Collection[int]) -> frozenset[int]:
    """Return the ids of the student's model folder and of the teachers that the student's tokenizer has.

    Args:
        teacher_ids: Ids at which the teachers end a turn.
    """
    stop_ids = frozenset({*stop_token_ids(str(student.path)), *teacher_ids})
    return frozenset(token for token in stop_ids if 0 <= token < student.n_tokens)


def check_stop_ids(config: Config, student: Student, teacher_ids: Collection[int]) -> frozenset[int]:
    """Check the ids at which a sampled response ends. A run that samples no response needs none.

    Args:
        teacher_ids: Ids at which the teachers end a turn.

    Returns:
        Result of :func:`find_stop_ids`.

    Raises:
        ConfigError: There is no such id, and each response would run to its limit. The same error is raised if
            reference responses end with an id that does not end a sampled one: training on them would teach the student
            never to stop.
    """
    usable = find_stop_ids(student, teacher_ids)
    if config.gkd.sft_share == 1 and not runs_validation(config):
        return usable
    remedy = f"in {student.path}/generation_config.json"
    if not usable:
        stop_ids = sorted({*stop_token_ids(str(student.path)), *teacher_ids})
        found = f"only {stop_ids}, which its tokenizer does not have" if stop_ids else "none"
        raise ConfigError(
            "no token ends a sampled response, so that each would run to data.max_response_length="
            f"{config.data.max_response_length}: config.json and generation_config.json of the student and of its "
            f"teachers name {found}",
            remedy=f"set eos_token_id {remedy} to the ids that end a turn",
            keys=("data.max_response_length",),
        )
    eos_id = student.tokenizer.eos_token_id
    if eos_id is None or eos_id in usable:
        return usable
    listed = ", ".join(map(str, sorted(usable | {eos_id})))
    mismatch = (
        f"the tokenizer of {student.path} ends a text with {student.tokenizer.eos_token!r} (id {eos_id}), but sampled "
        f"responses end at {sorted(usable)}"
    )
    if trains_on_references(config.gkd):
        source, shown = reference_setting(config.gkd)
        raise ConfigError(
            f"{mismatch}: {shown} would train on reference responses that end with an id at which generation continues",
            remedy=f"set eos_token_id {remedy} to [{listed}], or correct eos_token in its tokenizer_config.json",
            keys=(source,),
        )
    log.warning("%s; if %d also ends a turn, set eos_token_id %s to [%s]", mismatch, eos_id, remedy, listed)
    return usable


def check_teacher(name: str, client: TeacherBackend, student: Student, config: Config) -> TeacherInfo:
    """Check that one teacher can teach this student, and return its properties.

    Raises:
        ConfigError: The teacher does not fit the student or the configuration.
        TeacherError: The teacher cannot be reached, or refuses a request.
    """
    info = hello_now(client, config)
    label = f"teacher {name} ({info.model_name})"
    if n_ids := check_vocabulary(label, info, student, config.actor_rollout_ref.teacher.vocabulary):
        client.restrict_ids(n_ids)
    _check_limits(name, label, info, student, config)
    # Some engines score at temperature 1 only, or their own top k, and refuse this request. A recording has checked it.
    trial = two_tokens(config)
    if (config.gkd.distill_temperature != 1 or trial.n_support) and scores_any_sequence(client):
        score_now(name, client, [trial], config)
    return info


def two_tokens(config: Config) -> TeacherSequence:
    """Return a sequence of two tokens to score, with the support of the configuration."""
    support = Support.of(config)
    ids_1J = np.arange(support.n_student_ids, dtype=np.int32)[None]
    return TeacherSequence(
        np.zeros(2, np.int32),
        prompt_len=1,
        support_ids_TJ=ids_1J if support.n_student_ids else None,
        with_top_k=support.with_top_k,
    )


def read_prompts(config: Config, data_set: DataSet, student: Student, stop_token_ids: Sequence[int]) -> PromptData:
    """Tokenize the prompts of a run, and the reference responses if it trains on them. Read the weights of tokens.

    Args:
        stop_token_ids: Ids at which the teachers end a turn.

    Raises:
        DataError: A row cannot be used.
    """
    ends = check_stop_ids(config, student, stop_token_ids)
    with_references = trains_on_references(config.gkd)
    data = PromptData(data_set, config.data, student.tokenizer, with_references=with_references, stop_token_ids=ends)
    _check_ids(data, student)
    if (column := weights_column(config.gkd)) is not None:
        data.set_weights(read_weights(data_set, data.rows, column))
    return data


def _check_ids(data: PromptData, student: Student) -> None:
    """Check that the student's output layer has all ids. A tokenizer may have more.

    Raises:
        DataError: A prompt or a reference response has another id.
    """
    for what, all_ids in (("prompt", data.ids), ("reference response", data.reference_ids)):
        for row, ids in zip(data.rows, all_ids, strict=False):  # without reference responses the list is empty
            if (largest := int(ids.max())) >= student.n_tokens:
                raise DataError(
                    f"{data.data_set[row].where}: the token ids of the {what} go up to {largest}, but the output layer "
                    f"of the student {student.path} has the ids 0 to {student.n_tokens - 1}",
                    remedy="remove the row, or use a student whose output layer covers its tokenizer",
                )


def read_teacher_prompts(
    config: Config, data: PromptData, routes: Routes, clients: Mapping[str, TeacherBackend], student: Student
) -> None:
    """Add the prompts of teachers that do not see the student's, if there are any. Errors: `check_teacher_prompts`."""
    if clients and (prompts := make_teacher_prompts(data, routes, config, student.tokenizer)):
        check_teacher_prompts(clients, prompts.longest, config)
        data.set_teacher_prompts(prompts.ids, prompts.fingerprint)


def check_teacher_prompts(clients: Mapping[str, TeacherBackend], longest: Mapping[str, int], config: Config) -> None:
    """Check that the prompts of the teachers leave room for a response.

    Args:
        longest: Length of the longest prompt of each teacher that does not see the student's prompts, in tokens.

    Raises:
        ConfigError: A teacher cannot score the longest response after its longest prompt.
        TeacherError: A teacher cannot be reached.
    """
    for name, n_prompt in longest.items():
        info = hello_now(clients[name], config)
        n_response = max_scored_tokens(config)
        log.info("teacher %s: own prompts of up to %d tokens, scores up to %d", name, n_prompt, info.max_model_len)
        if n_prompt + n_response > info.max_model_len:
            keys = ("data.max_response_length", f"{TEACHER}.prompt_template", "data.teacher_prompt_key")
            raise ConfigError(
                f"it scores at most {info.max_model_len} tokens, but its longest prompt has {n_prompt}, and a response "
                f"up to {n_response}: {n_prompt + n_response} in all",
                remedy="start the teacher with a larger MAX_MODEL_LEN, lower data.max_response_length, or shorten the "
                f"texts of {TEACHER}.prompt_template or data.teacher_prompt_key",
                worker=f"teacher {name} ({info.model_name})",
                keys=keys,
            )


def _check_limits(name: str, label: str, info: TeacherInfo, student: Student, config: Config) -> None:
    gkd, teacher = config.gkd, config.actor_rollout_ref.teacher
    if teacher.top_k is not None and teacher.top_k > info.n_logprobs:
        raise ConfigError(
            f"{TEACHER}.top_k={teacher.top_k}, but it returns at most {info.n_logprobs} ids",
            remedy="lower the key, set it to null, or start the teacher with a larger N_LOGPROBS",
            worker=label,
            keys=(f"{TEACHER}.top_k",),
        )
    support, n_ids = Support.of(config), min(info.n_tokens, student.n_tokens)
    if support.n_student_ids > n_ids:
        raise ConfigError(
            f"{TEACHER}.student_top_k={support.n_student_ids}, but student and teacher share {n_ids} token ids",
            remedy="lower it",
            worker=label,
            keys=(f"{TEACHER}.student_top_k",),
        )
    uses_tail = not (uses_sampled_token_loss(gkd) or uses_custom_loss(gkd))
    if 1 in support.sizes(teacher.top_k or info.n_logprobs) and gkd.tail == "renormalize" and uses_tail:
        key = "student_top_k" if support.n_student_ids == 1 and not support.with_top_k else "top_k"
        raise ConfigError(
            "gkd.tail=renormalize with a top 1: one renormalized id has probability 1 for both models, and the "
            "gradient is zero",
            worker=label,
            remedy=f"set gkd.tail=bucket, or raise {TEACHER}.{key}"
            + (" or the teacher's N_LOGPROBS" if key == "top_k" else ""),
            keys=("gkd.tail", f"{TEACHER}.{key}"),
        )
    n_response = max_scored_tokens(config)
    limit = "data.max_response_length" if n_response == config.data.max_response_length else "gkd.max_loss_position"
    longest = config.data.max_prompt_length + n_response
    if info.max_model_len < longest and prompt_settings(teacher, config.data).get(name) is None:
        raise ConfigError(
            f"it scores at most {info.max_model_len} tokens, but data.max_prompt_length + {limit} = {longest}",
            remedy="lower one of them, or start the teacher with a larger MAX_MODEL_LEN",
            worker=label,
            keys=("data.max_prompt_length", limit),
        )
