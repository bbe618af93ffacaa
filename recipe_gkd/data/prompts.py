"""Prompts: parquet files -> tokenized once -> batches at a position that can be saved and restored.

The run's prompts are one endless-looking stream: epoch after epoch, each a permutation drawn from ``data.seed`` and
its number. Batch ``i`` is the stream's slice ``[i * B, (i + 1) * B)``, across the ends of epochs, so each prompt is
used exactly once an epoch, no batch but the run's last is short, and the position is a single number. Which prompts are
trained on the answer that the data gives them (``gkd.sft_share``) follows from their places in the stream, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)


class PromptData:
    """The tokenized prompts of some parquet files.

    ``ids[i]`` int32 [P] are the tokens of row ``rows[i]`` of ``table``; overlong rows were dropped or cut. With
    ``given_answers``, ``reference_ids[i]`` int32 [T] are those of its ``data.response_key``.

    ``fingerprint`` is a hash of the prompts of these rows. ``answers_fingerprint`` is one of their reference responses,
    empty without ``given_answers``.
    """

    def __init__(
        self,
        table: pa.Table,
        config: DataConfig,
        tokenizer: Any,
        *,
        given_answers: bool = False,
        stop_token_ids: Collection[int] = (),
        name: str = "the training data",
    ) -> None:
        """Tokenize the prompts, and with ``given_answers`` the reference responses.

        Args:
            stop_token_ids: Ids at which a sampled response ends, besides ``tokenizer.eos_token_id``. A reference
                response that ends with one of them is complete; to others ``tokenizer.eos_token_id`` is appended.
            name: Name of the data, for messages.
        """
        self.table, self.name = table, name
        prompts = table.column(config.prompt_key).to_pylist()
        began = time.monotonic()
        self.ids: list[np.ndarray] = []
        self.rows: list[int] = []
        dropped = 0
        for row, prompt in enumerate(prompts):
            ids = _tokenize(prompt, tokenizer, f"row {row} of {name}")
            if len(ids) > config.max_prompt_length:
                if config.filter_overlong_prompts:
                    dropped += 1
                    continue
                ids = _truncate(ids, config, row)
            self.ids.append(ids)
            self.rows.append(row)
        self.fingerprint = _fingerprint(prompts, self.rows)
        if dropped:
            log.warning(
                "%s: %d of %d prompts are longer than data.max_prompt_length=%d and were dropped",
                name,
                dropped,
                len(prompts),
                config.max_prompt_length,
            )
        log.info("tokenized %d prompts of %s in %.1f s", len(prompts), name, time.monotonic() - began)
        if not self.ids:
            raise DataError(
                f"no prompt is left of the {len(prompts)} given: all are longer than "
                f"data.max_prompt_length={config.max_prompt_length}; raise it"
            )
        self._ends = frozenset({*stop_token_ids, tokenizer.eos_token_id}) if given_answers else frozenset()
        self.reference_ids: list[np.ndarray] = []
        self.answers_fingerprint = ""
        if given_answers:
            self.reference_ids = _reference_responses(table, self.rows, config, tokenizer, self._ends)
            self.answers_fingerprint = _fingerprint(table.column(config.response_key).to_pylist(), self.rows)

    def __len__(self) -> int:
        return len(self.ids)

    def prompt(self, index: int, uid: int, *, given: bool = False) -> Prompt:
        reference_ids = self.reference_ids[index] if given else None
        return Prompt(uid=uid, ids=self.ids[index], row=self.rows[index], reference_ids=reference_ids)

    def reference_response(self, prompt: Prompt, version: int) -> Response:
        """Of a prompt that has one, as if weights of ``version`` had sampled it, with certainty."""
        assert prompt.reference_ids is not None
        ids = prompt.reference_ids
        return Response(
            uid=prompt.uid,
            ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason="stop" if int(ids[-1]) in self._ends else "length",
            weights_version=version,
            versions_T=np.full(len(ids), version, np.int32),
        )


class PromptLoader:
    """Batches of prompts from any position of the run.

    ``position`` is the number of prompts that have been trained on: all that a checkpoint needs to keep. A share of the
    prompts, ``sft_share``, comes once, with its given answer; the others ``n`` times.

    The run ends after ``max_steps`` steps, over as many epochs as they take, or if that is None, after ``epochs``.
    """

    def __init__(
        self,
        data: PromptData,
        config: DataConfig,
        *,
        n: int,
        epochs: int,
        max_steps: int | None,
        sft_share: float = 0.0,
    ) -> None:
        self.data, self.config, self.n = data, config, n
        self._share = Fraction(sft_share).limit_denominator(1_000_000)  # 0.29 times 100 is 29
        self.total_prompts = None if max_steps is not None else len(data) * epochs
        """Prompts of the whole run; None if ``max_steps`` determines its length."""
        self.max_steps = max_steps
        self._cached = (-1, np.arange(0))  # the order of the epoch last asked for

    def last_step(self, position: int, step: int) -> int:
        """The number of steps that the run will have done at its end, if ``step`` have brought it to ``position``."""
        if self.total_prompts is None:
            return max(step, self.max_steps or 0)
        return step + math.ceil(max(0, self.total_prompts - position) / self.config.train_batch_size)

    def batches(self, position: int, first_step: int) -> Iterator[PromptBatch]:
        size = self.config.train_batch_size
        for step in range(first_step, self.last_step(position, first_step)):
            start = position + (step - first_step) * size
            stop = start + size if self.total_prompts is None else min(start + size, self.total_prompts)
            places = range(start, stop)
            prompts = [prompt for place in places for prompt in self._prompts_at(place)]
            yield PromptBatch(step=step, epoch=places.stop / len(self.data), prompts=prompts)

    def _prompts_at(self, place: int) -> Iterator[Prompt]:
        index, first_uid = self._index(place), place * self.n
        if self._is_given(place):
            yield self.data.prompt(index, first_uid, given=True)
        else:
            yield from (self.data.prompt(index, first_uid + response) for response in range(self.n))

    def _is_given(self, place: int) -> bool:
        """Evenly spread: among the first P places are floor(share * P)."""
        return math.floor((place + 1) * self._share) > math.floor(place * self._share)

    def _index(self, place: int) -> int:
        """Which prompt stands at a place of the stream."""
        epoch, offset = divmod(place, len(self.data))
        return int(self._order(epoch)[offset])

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached[0] != epoch:
            order = np.arange(len(self.data))
            if self.config.shuffle:
                order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.data))
            self._cached = (epoch, order)
        return self._cached[1]


def read_table(files: list[str], prompt_key: str) -> pa.Table:
    """All rows of parquet files that have the column ``prompt_key``; :class:`DataError` names what is wrong."""
    if not files:
        raise DataError("no data file was given; set data.train_files to one or more parquet files")
    tables = []
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"data file {path} does not exist (working directory: {Path.cwd()})")
        try:
            names = Counter(pq.read_schema(path).names)
            if twice := [column for column, count in names.items() if count > 1]:
                raise DataError(f"data file {path}: two columns are named {twice[0]}; rename or remove one of them")
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"data file {path} cannot be read as parquet: {error}") from error
        if prompt_key not in table.column_names:
            raise DataError(
                f"data file {path} has no column {prompt_key!r}; it has: "
                f"{', '.join(table.column_names) or 'none'}. Set data.prompt_key to the column of the prompts"
            )
        if table.num_rows == 0:
            raise DataError(f"data file {path} has no rows")
        tables.append(table)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the columns of {', '.join(files)} do not fit together: {error}. Give a column one type in all files"
        ) from error


def column_path(table: pa.Table, key: str, *, setting: str, is_for: str) -> list[str]:
    """Of a column whose name is ``key``, or of a field of a structure that its dots lead into.

    ``setting``: the key of the configuration, and ``is_for`` the column's purpose, for :class:`DataError`.
    """
    if key in table.column_names:
        return [key]
    path = key.split(".")
    fields: Any = table.schema
    for depth, name in enumerate(path):
        names = [field.name for field in fields] if isinstance(fields, pa.Schema | pa.StructType) else []
        if name not in names:
            inside = f"column {'.'.join(path[:depth])} has {', '.join(names) or 'no fields'}" if depth else ""
            raise DataError(
                f"{setting}={key}: the data has no such column; "
                + (inside or f"it has: {', '.join(names)}")
                + f". Set {setting} to the column {is_for}"
            )
        field = fields.field(name)
        fields = field.type if isinstance(field, pa.Field) else field
    return path


def column_at(table: pa.Table, path: list[str]) -> pa.ChunkedArray:
    """What :func:`column_path` leads to."""
    column = table.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, [name])
    return column


def _fingerprint(values: list[Any], rows: list[int]) -> str:
    """Return a hash of the values of ``rows``, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(values[row], sort_keys=True, default=str).encode() + b"\n")  # JSON has no line feed
    return digest.hexdigest()


def _tokenize(prompt: Any, tokenizer: Any, where: str) -> np.ndarray:
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        bos = tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:  # one of the text, and one that the tokenizer adds
            ids = ids[1:]
    elif (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    ):
        messages = _messages(prompt, where)
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # jinja and the template's own raise_exception: no common base
            raise DataError(f"{where}: the tokenizer's chat template refused the prompt: {error}") from error
    else:
        raise DataError(
            f"{where}: the prompt is {prompt!r:.200}; expected a string, or a list of "
            "{'role': ..., 'content': ...} messages that is not empty"
        )
    if len(ids) == 0:
        raise DataError(f"{where}: the prompt has no tokens; remove the row")
    return np.asarray(ids, dtype=np.int32)


def _messages(prompt: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages without null fields, because parquet gives every message the fields of all others.

    A message that calls tools needs no content and gets an empty one. Any other without content is refused: a template
    would print it as ``None``.
    """
    messages = []
    for number, message in enumerate(prompt):
        if message["content"] is None and not message.get("tool_calls"):
            raise DataError(
                f"{where}: the content of message {number} (role {message['role']!r}) is null; expected a string. Fill "
                "it in or remove the row; only a message with tool_calls may be without content"
            )
        messages.append({"content": ""} | {key: value for key, value in message.items() if value is not None})
    return messages


def _reference_responses(
    table: pa.Table, rows: list[int], config: DataConfig, tokenizer: Any, ends: Collection[int | None]
) -> list[np.ndarray]:
    """Return the reference response of each row, int32 [T], cut at ``max_response_length``.

    It ends with one of ``ends``: the end-of-sequence token is appended where the text does not end with one itself.
    """
    key, limit = config.response_key, config.max_response_length
    advice = "Set data.response_key to the column of the answers, or gkd.sft_share=0 to train without them"
    if key not in table.column_names:
        raise DataError(
            f"gkd.sft_share is above 0, but the data has no column data.response_key={key}; it has: "
            f"{', '.join(table.column_names)}. {advice}"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the student's tokenizer has no end-of-sequence token, with which given answers end: set eos_token in its "
            "tokenizer_config.json, or gkd.sft_share=0"
        )
    responses = table.column(key).to_pylist()
    given = []
    for row in rows:
        text = responses[row]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else []
        if len(ids) == 0:
            raise DataError(
                f"row {row} of the training data: the answer in column {key!r} is {text!r:.200}; expected a string "
                f"that is not empty. Remove the row. {advice}"
            )
        if ids[-1] not in ends:
            ids = [*ids, tokenizer.eos_token_id]
        given.append(np.asarray(ids[:limit], dtype=np.int32))
    return given


def _truncate(ids: np.ndarray, config: DataConfig, row: int) -> np.ndarray:
    limit = config.max_prompt_length
    if config.truncation == "error":
        raise DataError(
            f"the prompt of row {row} has {len(ids)} tokens, more than data.max_prompt_length={limit}; "
            "raise it, set data.filter_overlong_prompts=true, or data.truncation to left, right or middle"
        )
    if config.truncation == "left":
        return ids[-limit:]
    if config.truncation == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
