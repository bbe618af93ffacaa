"""Responses of a model for ``data inspect --rollout``: tokens that the student sampled, and those added by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.commands.sampled_responses import SampledModel, sample_responses
from recipe_gkd.config import Config
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.setup import check_turns
from recipe_gkd.data.parts import as_sampled, parts_of
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.model_files import find_model
from recipe_gkd.rollout.offline_engine import OfflineEngineOptions, OfflineSampling, prepare_environment
from teacher.common.display_text import make_visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT, REWRITTEN, SAMPLED, ADDED = "prompt", "rewritten", "sampled", "added"
CACHE_BYTES = 1 << 28


def describe_rollouts(
    config: Config, data_set: DataSet, rows: range, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool | None
) -> Iterator[str]:
    """Yield responses of the model to some rows, with the part of each token.

    Args:
        config: Model, and settings of sampling and of conversations.
        rows: Indices of the rows.
        pool: Environments of conversations. None for responses of one turn.

    Raises:
        ConversationError: An environment failed, and the configuration says that this is an error.
    """
    prepare_environment()
    rollout = config.actor_rollout_ref.rollout
    sampling = OfflineSampling(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=config.data.seed,
    )
    data = PromptData(data_set.take(rows), config.data, tokenizer)
    check_turns(config, data, tokenizer)
    settings = config.actor_rollout_ref.model
    model = SampledModel(folder=find_model(settings.path), tokenizer=tokenizer, data=data, config=config)
    options = OfflineEngineOptions(cpu_cache_bytes=CACHE_BYTES, trust_remote_code=settings.trust_remote_code)
    responses, _ = sample_responses(model, pool, sampling, options)
    for response in responses:
        prompt = data.prompt(response.uid, response.uid)
        yield from describe_rollout(replace(prompt, row=rows[prompt.row]), response, tokenizer)


def describe_rollout(prompt: Prompt, response: Response, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the lines of a response: its tokens in order, one line for each stretch of the same part.

    Only ``sampled`` tokens are trained on. A line ``rewritten`` begins a sequence: its tokens replace all before them.
    """
    end: str = response.finish_reason
    counts = f"{len(response.ids)} sampled tokens"
    if (transcript := response.transcript) is not None:
        end = transcript.end
        counts = f"{transcript.n_turns} turns, {transcript.n_tool_calls} tool calls, {counts}"
        if transcript.failure:
            counts += f", failed: {make_visible(transcript.failure)}"
    yield f"response to row {prompt.row}: {counts}, end: {end}"
    for number, (context, part) in enumerate(parts_of(as_sampled(prompt, response), response)):
        yield _line(REWRITTEN if number else PROMPT, context.ids, tokenizer)
        is_sampled = np.zeros(len(part.sequence_ids), np.bool_)
        is_sampled[part.offsets_T] = True
        for name, stretch in groupby(
            zip(is_sampled, part.sequence_ids, strict=True), lambda token: SAMPLED if token[0] else ADDED
        ):
            yield _line(name, np.array([token_id for _, token_id in stretch]), tokenizer)


def _line(name: str, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return f"  {name:9} {len(ids):5}  {make_visible(str(text))}"
