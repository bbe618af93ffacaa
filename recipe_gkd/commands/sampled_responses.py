"""Responses of a model folder without a run: single turns, or conversations with tools or an environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.open_batch import Batch
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import ConfigError
from recipe_gkd.rollout.offline_engine import (
    Generated,
    OfflineEngineOptions,
    OfflineSampling,
    generate,
    generate_each,
    limit_to_model,
    vllm_engine,
)
from recipe_gkd.rollout.sampling import request_seed, stop_token_ids
from recipe_gkd.rollout.turns import Turn, TurnRequest
from recipe_gkd.rollout.vllm.tool_calls import MessageParser
from recipe_gkd.runtime.threads import start_in_thread
from teacher.common.fingerprint import count_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM


@dataclass(frozen=True, kw_only=True)
class SampledModel:
    """A model, and the data that it answers.

    Attributes:
        folder: Hugging Face folder.
        tokenizer: Its tokenizer.
        data: Prompts, tokenized with it.
        config: Lengths, and settings of conversations.
    """

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    data: PromptData
    config: Config


def sample_responses(
    model: SampledModel, pool: EnvironmentPool | None, sampling: OfflineSampling, options: OfflineEngineOptions
) -> tuple[list[Response], float]:
    """Return the responses to all prompts, ``n`` to each, in the order of their uids, and the seconds of generation.

    Args:
        pool: Environments of conversations. None for responses of one turn.
        sampling: Settings of sampling. ``max_tokens`` is the limit of a whole conversation.
        options: Settings of the engine, whose ``max_model_len`` is set here.

    Raises:
        ConversationError: An environment failed, and the configuration says that this is an error.
    """
    config, data, may_replace_prompts = model.config, model.data, model.config.rollout.environment is not None
    longest = config.data.max_prompt_length if may_replace_prompts else max(map(len, data.ids))
    max_len = limit_to_model(longest + sampling.max_tokens, model.folder)
    options = replace(options, max_model_len=max_len)
    if pool is not None and max_len - longest < sampling.max_tokens:
        # A turn beyond the positions of the model would be an error of the engine.
        if max_len <= longest:
            raise ConfigError(
                f"{model.folder} has {max_len} positions, and the longest prompt {longest} tokens",
                remedy="shorten the prompts, or lower data.max_prompt_length",
                keys=("data.max_prompt_length",),
            )
        lengths = replace(config.data, max_response_length=max_len - longest)
        model = replace(model, config=replace(config, data=lengths))
    with vllm_engine(model.folder, options, n_tokens=count_ids(model.tokenizer)) as engine:
        started = time.monotonic()
        if pool is not None:
            responses = _conversations(engine, model, pool, sampling)
        else:
            generated = [one for several in generate(engine, data.ids, sampling) for one in several]
            responses = [_response(one, uid) for uid, one in enumerate(generated)]
        return responses, time.monotonic() - started


def _conversations(
    engine: LLM, model: SampledModel, pool: EnvironmentPool, sampling: OfflineSampling
) -> list[Response]:
    config, data, n = model.config, model.data, sampling.n
    parser = MessageParser(model.tokenizer, config.rollout.tool_parser, stop_token_ids(str(model.folder)))
    stage = ConversationStage(ConversationContext(config, model.tokenizer, pool))
    prompts = [data.prompt(index, index * n + k) for index in range(len(data)) for k in range(n)]
    return asyncio.run(_converse(stage, _Replica(engine, sampling, parser), data, prompts))


GENERATION_END_S = 60.0
"""Time that the engine has to complete its turns after an error or Ctrl-C. It must not be shut down before."""


async def _converse(
    stage: ConversationStage, replica: _Replica, data: PromptData, prompts: Sequence[Prompt]
) -> list[Response]:
    found: dict[int, Response] = {}
    batch = Batch(data=data, replica=0, step=0, sampling="validation")
    try:
        async for responses in stage.generate(batch, prompts, replica.send):
            found |= {response.uid: response for response in responses}
    finally:
        await stage.close()
        await replica.close()
    return [found[prompt.uid] for prompt in prompts]


class _Replica:
    """The engine, which generates one list of turns at a time. Turns that are requested meanwhile are the next list."""

    def __init__(self, engine: LLM, sampling: OfflineSampling, parser: MessageParser) -> None:
        self._engine, self._sampling, self._parser = engine, sampling, parser
        self._waiting: list[tuple[TurnRequest, asyncio.Future[Turn]]] = []
        self._turn = asyncio.Lock()
        self._generation: Future[list[Turn]] | None = None

    async def send(self, requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
        """Yield the turns."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Turn]] = [loop.create_future() for _ in requests]
        self._waiting += zip(requests, futures, strict=True)
        async with self._turn:
            taken, self._waiting = self._waiting, []
            if taken:
                self._generation = start_in_thread(self._generate, [request for request, _ in taken])
                turns = await asyncio.wrap_future(self._generation)
                for (_, future), turn in zip(taken, turns, strict=True):
                    future.set_result(turn)
        yield [await future for future in futures]

    async def close(self) -> None:
        """Wait until the engine generates nothing."""
        if self._generation is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(GENERATION_END_S):
                    await asyncio.gather(asyncio.wrap_future(self._generation), return_exceptions=True)

    def _generate(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        generated = generate_each(self._engine, [(each.prompt.ids, self._sampling_of(each)) for each in requests])
        responses = [_response(one, each.prompt.uid) for [one], each in zip(generated, requests, strict=True)]
        return [
            Turn(response=response, message=self._parser.message(response, each.tools))
            for response, each in zip(responses, requests, strict=True)
        ]

    def _sampling_of(self, request: TurnRequest) -> OfflineSampling:
        seed = request_seed(self._sampling.seed, request.prompt.uid, 0, request.number)
        return replace(self._sampling, n=1, max_tokens=request.max_tokens, seed=seed)


def _response(generated: Generated, uid: int) -> Response:
    n = len(generated.ids)
    return Response(
        uid=uid,
        ids=generated.ids,
        logprobs=np.zeros(n, np.float32),
        finish_reason="length" if generated.finish_reason == "length" else "stop",
        weights_version=0,
        versions_T=np.zeros(n, np.int32),
    )
