"""Record a teacher's scores of the reference responses, for training without a teacher.

python -m recipe_gkd record --out FOLDER data.response_key=COLUMN key=value ...

The other keys are the training's: data, student and teacher. Each row's reference response is scored after its prompt,
and the scores are written to FOLDER as parquet files with a manifest. The same command continues a recording that was
interrupted. Train on it with

    gkd.sft_share=1 gkd.sft_target=teacher
    actor_rollout_ref.teacher.backend=recorded actor_rollout_ref.teacher.path=FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.config import Config
from recipe_gkd.config.caller import caller_path
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.load import read_config
from recipe_gkd.config.teachers import names
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.data.samples import Sample
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import check_teachers, read_prompts, read_student, read_teacher_prompts
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from recipe_gkd.teachers.backends import hello_now
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.recorded.layout import RecordingSource
from recipe_gkd.teachers.recorded.writer import RecordingWriter
from recipe_gkd.teachers.router import Teachers, open_teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.worker_count import with_worker_count
from teacher.records import TeacherInfo

REQUEST_ROWS = 16
"""Responses per request."""
REQUESTS_PER_WORKER = 4
"""Open requests per worker of the teacher, so that it need not wait for the next one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if the recording is complete, 1 after an error, 130 after Ctrl-C.
    """
    parser = command_parser("record", __doc__)
    parser.add_argument("--out", type=caller_path, required=True, metavar="FOLDER", help="folder of the recording")
    parser.add_argument(
        "--dtype", choices=["float32", "float16"], default="float32", help="type of the log-probabilities in the files"
    )
    parser.add_argument("--rows-per-file", type=_positive, default=1024, help="responses in a file")
    arguments = parser.parse_intermixed_args(argv)
    try:
        overrides = ["gkd.sft_share=1", "gkd.sft_target=teacher", *arguments.overrides]
        loaded = read_config(arguments.config_name, overrides, arguments.config_dir)
        for text in loaded.warnings:
            print(f"warning: {text}", file=sys.stderr)
        record(_for_references(loaded.config), Path(arguments.out), arguments.dtype, arguments.rows_per_file)
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'record')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _for_references(config: Config) -> Config:
    """Return the configuration with reference responses for all rows, which the teacher scores.

    Raises:
        ConfigError: There is no column of reference responses, or not exactly one live teacher.
    """
    if config.data.response_key is None:
        raise ConfigError(
            "record needs the column of the reference responses",
            keys=("data.response_key",),
            remedy="set data.response_key",
        )
    teacher = config.actor_rollout_ref.teacher
    if len(names(teacher)) > 1:
        raise ConfigError(
            f"{TEACHER}.teachers has {len(names(teacher))} teachers, and a recording has one",
            keys=(f"{TEACHER}.teachers",),
            remedy="record each teacher in a separate folder",
        )
    if teacher.backend == "recorded":
        raise ConfigError(
            f"{TEACHER}.backend=recorded cannot be recorded again", keys=(f"{TEACHER}.backend",), remedy="set another"
        )
    if teacher.on_failure == "skip_samples":
        raise ConfigError(
            f"{TEACHER}.on_failure=skip_samples would leave responses out of the recording",
            keys=(f"{TEACHER}.on_failure",),
            remedy="set it to wait or fail; the same command continues",
        )
    gkd = replace(
        config.gkd, sft_share=1.0, warmup_steps=0, sft_target="teacher", enable_teacher=True, max_loss_position=None
    )
    live = replace(config.actor_rollout_ref, teacher=replace(teacher, path=None))  # not what an earlier recording has
    return replace(config, gkd=gkd, actor_rollout_ref=live)


def record(config: Config, folder: Path, dtype: str, rows_per_file: int) -> None:
    """Record the scores of all reference responses.

    Args:
        config: Configuration with a teacher, and reference responses for all rows.
        folder: Folder of the recording.
        dtype: Type of the log-probabilities.
        rows_per_file: Number of responses in a file.

    Raises:
        GkdError: The configuration, the data or the student cannot be used.
        TeacherError: The teacher failed.
    """
    student = read_student(config)
    data_set = read_data_set(config.data.train_files, config.data, "the data", config.data.train_max_samples)
    routes = Routes(names(config.actor_rollout_ref.teacher))
    with open_teachers(config, routes) as teachers:
        stop_token_ids = check_teachers(teachers.clients, student, config)
        teachers.use_caches(open_caches(config, teachers.clients))
        config = with_worker_count(config, teachers.clients)
        [client] = teachers.clients.values()
        data = read_prompts(config, data_set, student, stop_token_ids)
        read_teacher_prompts(config, data, routes, teachers.clients, student)
        writer = RecordingWriter(folder, _source(config, student, hello_now(client, config), data, dtype))
        if writer.n_done:
            print(f"{folder}: {writer.n_done} of {len(data)} responses are recorded already")
        asyncio.run(_write_all(config, data, teachers, writer, rows_per_file))
    print(f"{folder}: {writer.n_done} responses are recorded")


async def _write_all(
    config: Config, data: PromptData, teachers: Teachers, writer: RecordingWriter, rows_per_file: int
) -> None:
    began, first = time.monotonic(), writer.n_done
    samples: list[Sample] = []
    try:
        async for scored in _scored(config, data, teachers, first):
            samples += scored
            while len(samples) >= rows_per_file:
                writer.write(samples[:rows_per_file])
                del samples[:rows_per_file]
                rate = (writer.n_done - first) / (time.monotonic() - began)
                print(f"{writer.n_done} of {len(data)} responses, {rate:.1f}/s", flush=True)
    finally:  # also after Ctrl-C and a failure of the teacher
        if samples:
            writer.write(samples)


async def _scored(config: Config, data: PromptData, teachers: Teachers, first: int) -> AsyncIterator[list[Sample]]:
    """Yield the scored samples from row ``first`` on, in order. Several requests are open at the same time."""
    n_open = REQUESTS_PER_WORKER * (config.actor_rollout_ref.teacher.n_server_workers or 1)
    starts = iter(range(first, len(data), REQUEST_ROWS))
    async with FirstErrorTaskGroup() as tasks:
        calls = [tasks.start(_score(data, teachers, start)) for start in islice(starts, n_open)]
        while calls:
            yield await calls.pop(0)
            calls += [tasks.start(_score(data, teachers, start)) for start in islice(starts, 1)]


async def _score(data: PromptData, teachers: Teachers, start: int) -> list[Sample]:
    prompts = [
        data.prompt(index, index, with_reference=True) for index in range(start, min(start + REQUEST_ROWS, len(data)))
    ]
    return await teachers.score([(prompt, data.reference_response(prompt, 0)) for prompt in prompts], 0)


def _source(config: Config, student: Student, info: TeacherInfo, data: PromptData, dtype: str) -> RecordingSource:
    teacher, n_tokens, fingerprint = config.actor_rollout_ref.teacher, info.n_tokens, info.tokenizer_fingerprint
    if fingerprint != student.fingerprint:  # its distributions are restricted to the student's ids
        n_tokens, fingerprint = student.n_tokens, student.fingerprint
    return RecordingSource(
        model_name=info.model_name,
        engine=info.engine,
        vocab_size=info.vocab_size,
        n_tokens=n_tokens,
        tokenizer_fingerprint=fingerprint,
        max_model_len=info.max_model_len,
        eos_token_ids=tuple(token for token in info.eos_token_ids if token < n_tokens),
        temperature=config.gkd.distill_temperature,
        top_k=teacher.top_k or info.n_logprobs,
        dtype="float16" if dtype == "float16" else "float32",
        prompts=data.fingerprint,
        references=data.references_fingerprint,
        teacher_prompts=data.teacher_prompts_fingerprint,
        n_responses=len(data),
    )
