"""Prompts: a data set is tokenized once and read in batches, from a position that a checkpoint stores.

The prompts of a run are one stream of epochs. Each epoch is a permutation of the data set, drawn from ``data.seed`` and
the number of the epoch. Batch ``i`` is the slice ``[i * B, (i + 1) * B)`` of the stream, also across epochs. Therefore
each prompt is used exactly once per epoch, only the last batch of the run can be smaller, and the position is one
number. The prompts that are trained on their reference response (``gkd.sft_share``, ``gkd.warmup_steps``) follow from
their positions in the stream and from the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.data.fingerprints import Fingerprint, PromptFingerprint
from recipe_gkd.data.rows import DataSet, Row
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.data.tokenization import (
    ChatTemplate,
    render_prompt,
    tokenize_prompt,
    tokenize_references,
    truncate_prompt,
)
from recipe_gkd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class PromptData:
    """Tokenized prompts of a data set.

    Attributes:
        data_set: All rows of the data set.
        name: Name of the data set, for messages.
        ids: Token ids of each prompt, int32 [P]. Overlong prompts were dropped or cut.
        rows: Row of each prompt in ``data_set``.
        text_row: First of these rows whose prompt is a text. None if all prompts are messages.
        template: Settings of the student's chat template.
        reference_ids: Token ids of each reference response, int32 [T]. Empty without ``with_references``.
        fingerprint: Hash of the prompts, the tools and the chat template; see :mod:`recipe_gkd.data.fingerprints`.
        references_fingerprint: Hash of the reference responses. Empty without ``with_references``.
        teacher_prompts_fingerprint: Hash of the teachers' own prompts. Empty without :meth:`set_teacher_prompts`.
    """

    def __init__(
        self,
        data_set: DataSet,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        with_references: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """Tokenize the prompts, and with ``with_references`` the reference responses.

        Args:
            data_set: Rows with prompts.
            config: Settings of the data.
            with_references: True to tokenize the reference responses too.
            stop_token_ids: Ids at which a sampled response ends, besides ``tokenizer.eos_token_id``. A reference
                response that ends with one of them is complete; to others ``tokenizer.eos_token_id`` is appended.

        Raises:
            DataError: A row cannot be used, or no prompt is left.
        """
        self.data_set, self.name = data_set, data_set.name
        self.template = ChatTemplate(config.apply_chat_template_kwargs, config.system_prompt)
        self.ids: list[np.ndarray] = []
        self.rows: list[int] = []
        self.text_row: int | None = None
        self.fingerprint = self._tokenize(config, tokenizer)
        self._end_ids = frozenset({*stop_token_ids, tokenizer.eos_token_id}) if with_references else frozenset()
        self.teacher_prompts_fingerprint = ""
        self._teacher_ids: Sequence[np.ndarray | None] | None = None
        self._weights: Sequence[np.ndarray | None] | None = None
        self.reference_ids: list[np.ndarray] = []
        self.references_fingerprint = ""
        if with_references:
            texts = Fingerprint()
            for text, ids in tokenize_references(data_set, self.rows, config, tokenizer, self._end_ids):
                self.reference_ids.append(ids)
                texts.add(text)
            self.references_fingerprint = texts.hexdigest()

    def _tokenize(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
        """Tokenize the prompts, log what is unusual, and return the fingerprint."""
        started_at = time.monotonic()
        inputs = PromptFingerprint(tokenizer, self.template)
        has_text, first_with_tools = False, None
        for row in self.data_set:
            has_text = has_text or isinstance(row.prompt, str)
            if first_with_tools is None and row.tools is not None:
                first_with_tools = row
            with row.locate_errors(config.prompt_key):
                ids = tokenize_prompt(row.prompt, tokenizer, row.where, template=self.template, tools=row.tools)
                if len(ids) > config.max_prompt_length:
                    if config.filter_overlong_prompts:
                        continue
                    ids = truncate_prompt(ids, config, row.where)
            self.ids.append(ids)
            self.rows.append(row.index)
            if self.text_row is None and isinstance(row.prompt, str):
                self.text_row = row.index
            inputs.add_prompt(row.prompt, row.tools)
        n_rows, limit = len(self.data_set), f"data.max_prompt_length={config.max_prompt_length}"
        if n_dropped := n_rows - len(self.rows):
            log.warning("%s: %d of %d prompts are longer than %s and were dropped", self.name, n_dropped, n_rows, limit)
        if has_text and getattr(tokenizer, "chat_template", None):
            log.warning(
                "%s: the prompts are plain text, which gets no chat template, but the tokenizer has one. For a chat "
                "model write them as a list of messages, such as [{'role': 'user', 'content': ...}] (docs/data.md)",
                self.name,
            )
        if first_with_tools is not None and ignores_tools(first_with_tools, tokenizer, self.template):
            log.warning(
                "%s: the tokenizer's chat template ignores the tools of data.tools_key=%s; use a model whose template "
                "describes tools, or set data.tools_key=null",
                self.name,
                config.tools_key,
            )
        log.info("tokenized %d prompts of %s in %.1f s", n_rows, self.name, time.monotonic() - started_at)
        if not self.ids:
            raise DataError(f"all {n_rows} prompts of {self.name} are longer than {limit}", remedy="raise it")
        return inputs.hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    def set_teacher_prompts(self, ids: Sequence[np.ndarray | None], fingerprint: str) -> None:
        """Set the prompts of teachers that do not see the student's.

        Args:
            ids: Token ids for each prompt, int32 [P], or None for the student's.
            fingerprint: Hash of what the prompts are made from.
        """
        self._teacher_ids, self.teacher_prompts_fingerprint = ids, fingerprint

    def set_weights(self, weights: Sequence[np.ndarray | None]) -> None:
        """Set the weights of the response tokens for each prompt; see :func:`recipe_gkd.data.weights.read_weights`."""
        self._weights = weights

    def prompt(self, index: int, uid: int, *, with_reference: bool = False) -> Prompt:
        """Return prompt ``index`` of the data set as sample ``uid`` of the run."""
        reference_ids = self.reference_ids[index] if with_reference else None
        teacher_ids = None if self._teacher_ids is None else self._teacher_ids[index]
        return Prompt(
            uid=uid,
            ids=self.ids[index],
            row=self.rows[index],
            reference_ids=reference_ids,
            teacher_ids=teacher_ids,
            weights=None if self._weights is None else self._weights[index],
        )

    def reference_response(self, prompt: Prompt, version: int) -> Response:
        """Return the reference response of a prompt that has one.

        The response looks as if weights of ``version`` had sampled it with probability 1.
        """
        assert prompt.reference_ids is not None
        ids = prompt.reference_ids
        return Response(
            uid=prompt.uid,
            ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason="stop" if int(ids[-1]) in self._end_ids else "length",
            weights_version=version,
            versions_T=np.full(len(ids), version, np.int32),
        )


class PromptLoader:
    """Batches of prompts from any position of the run.

    Attributes:
        data: Data set.
        config: Settings of the data.
        n: Number of responses that are sampled for a prompt.
        max_steps: Number of optimizer steps of the run. None if the number of epochs determines its length.
        total_prompts: Number of prompts of the run. None if ``max_steps`` determines its length.
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
        warmup_steps: int = 0,
    ) -> None:
        """Create a loader.

        Args:
            data: Data set.
            config: Settings of the data.
            n: Number of responses that are sampled for a prompt.
            epochs: Number of epochs of the run if ``max_steps`` is None.
            max_steps: Number of optimizer steps of the run, over as many epochs as needed.
            sft_share: Share of the prompts that come once, with their reference response, instead of ``n`` times.
            warmup_steps: Number of steps at the start of the run in which all prompts do.
        """
        self.data, self.config, self.n = data, config, n
        self._warmup_steps = warmup_steps
        self._sft_share = Fraction(sft_share).limit_denominator(1_000_000)  # exact: 100 prompts at 0.29 are 29
        self.total_prompts = None if max_steps is not None else len(data) * epochs
        self.max_steps = max_steps
        size = config.train_batch_size
        if size > len(data) and (self.total_prompts is None or self.total_prompts > len(data)):
            log.warning(
                "data.train_batch_size=%d is larger than the %d prompts of %s: a step trains on prompts more than "
                "once. Lower it to %d or less, or use more data",
                size,
                len(data),
                data.name,
                len(data),
            )
        self._cached_epoch, self._cached_order = -1, np.arange(0)

    def last_step(self, position: int, step: int) -> int:
        """Return the number of optimizer steps at the end of the run.

        Args:
            position: Number of prompts trained on so far.
            step: Number of optimizer steps so far.
        """
        if self.total_prompts is None:
            return max(step, self.max_steps or 0)
        return step + math.ceil(max(0, self.total_prompts - position) / self.config.train_batch_size)

    def batches(self, position: int, first_step: int) -> Iterator[PromptBatch]:
        """Yield the batches of the rest of the run.

        Args:
            position: Number of prompts trained on so far.
            first_step: Step of the first batch.
        """
        size = self.config.train_batch_size
        for step in range(first_step, self.last_step(position, first_step)):
            start = position + (step - first_step) * size
            stop = start + size if self.total_prompts is None else min(start + size, self.total_prompts)
            prompts = [prompt for index in range(start, stop) for prompt in self._prompts_at(index, step)]
            yield PromptBatch(step=step, epoch=stop / len(self.data), prompts=prompts)

    def _prompts_at(self, stream_index: int, step: int) -> Iterator[Prompt]:
        epoch, offset = divmod(stream_index, len(self.data))
        index, first_uid = int(self._order(epoch)[offset]), stream_index * self.n
        if step < self._warmup_steps or self._uses_reference(stream_index):
            yield self.data.prompt(index, first_uid, with_reference=True)
        else:
            yield from (self.data.prompt(index, first_uid + response) for response in range(self.n))

    def _uses_reference(self, stream_index: int) -> bool:
        """Return True for evenly spread indices: ``floor(sft_share * n)`` of the first n."""
        return math.floor((stream_index + 1) * self._sft_share) > math.floor(stream_index * self._sft_share)

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_epoch != epoch:
            order = np.arange(len(self.data))
            if self.config.shuffle:
                order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.data))
            self._cached_epoch, self._cached_order = epoch, order
        return self._cached_order


def ignores_tools(row: Row, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> bool:
    """Return True if the chat template prints the prompt of a row with tools as if it had none."""
    with_tools, without = (
        render_prompt(row.prompt, tokenizer, row.where, template=template, tools=tools) for tools in (row.tools, None)
    )
    return with_tools == without
