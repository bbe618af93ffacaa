"""Requests of a rollout engine: conversion from prompts and to responses, and the requests in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.config.keys import key_name
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import GkdError, WorkerError
from recipe_gkd.rollout.engine_commands import settle

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import FlatLogprobs, LLMEngine, LoRARequest, RequestOutput

_MAX_LENGTH = key_name(lambda config: config.actor_rollout_ref.rollout.max_model_len)
Deliver = Callable[[list[Response] | GkdError], None]
"""Callback on the engine's thread: it gets the responses that have just finished, or once the error that ended all."""
Convert = Callable[["RequestOutput", int], Any]
"""Conversion of a finished output and the engine's weights version to a result for the callback."""


class RequestTable:
    """Requests in flight, with the conversion of the output and the callback of each."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Convert, Callable[[Any], None]]] = {}
        self._numbers = itertools.count()

    def new_ids(self, n: int) -> list[str]:
        """Return ``n`` request ids that were not used before."""
        return [str(next(self._numbers)) for _ in range(n)]

    def ids(self) -> list[str]:
        """Return the ids of all requests in flight."""
        return list(self._requests)

    def add(self, request_id: str, uid: int, deliver: Deliver) -> None:
        """Register the request of a response."""
        self._requests[request_id] = partial(to_response, uid), deliver

    def add_log_probs(self, request_id: str, done: Future[list[float]]) -> None:
        """Register a request of :func:`add_log_probs_request`, and the future of its result."""

        def deliver(result: list[list[float]] | GkdError) -> None:
            if isinstance(result, GkdError):
                settle(done, error=result)
            else:
                settle(done, result=result[0])

        self._requests[request_id] = to_log_probs, deliver

    def remove(self, request_ids: Sequence[str]) -> list[str]:
        """Remove requests, and return the ids of the requests that were in flight."""
        return [request_id for request_id in request_ids if self._requests.pop(request_id, None)]

    def deliver_finished(self, outputs: Sequence[RequestOutput], version: int) -> None:
        """Remove finished requests, and pass their results to their callbacks.

        Args:
            outputs: Finished outputs of one engine step.
            version: Weights version of the engine.
        """
        finished: dict[Callable[[Any], None], list[Any]] = {}
        for output in outputs:
            if owner := self._requests.pop(output.request_id, None):
                convert, deliver = owner
                finished.setdefault(deliver, []).append(convert(output, version))
        for deliver, results in finished.items():
            deliver(results)

    def fail_all(self, failure: GkdError) -> None:
        """Remove all requests, and pass a copy of ``failure`` to each callback. Safe while another thread delivers."""
        owners: dict[Callable[[Any], None], None] = {}
        while self._requests:
            with suppress(KeyError):
                owners[self._requests.popitem()[1][1]] = None
        for deliver in owners:
            deliver(failure.located())


def add_request(
    engine: LLMEngine,
    request_id: str,
    prompt: Prompt,
    params: dict[str, Any],
    max_len: int,
    adapter: LoRARequest | None,
) -> None:
    """Add a prompt to an engine.

    Args:
        params: Keyword arguments of vLLM's ``SamplingParams``.
        max_len: Maximum length of a sequence, in tokens.
        adapter: Adapter that the engine adds to its weights; None: it has none.

    Raises:
        WorkerError: The prompt is empty, or leaves no room for a response.
    """
    from recipe_gkd.rollout.vllm.compat import RequestOutputKind, SamplingParams

    if not 0 < len(prompt.ids) < max_len:
        raise WorkerError(
            f"prompt {prompt.uid} (row {prompt.row}) has {len(prompt.ids)} tokens; expected 1 to {max_len - 1}, which "
            "leaves room for one response token",
            remedy=f"raise {_MAX_LENGTH}, or remove the row",
            keys=(_MAX_LENGTH,),
            uids=(prompt.uid,),
        )
    sampling = SamplingParams(
        **{"logprobs": 0, **params},  # the sampled token's is always returned
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt.ids.tolist()}, sampling, lora_request=adapter)


def add_log_probs_request(
    engine: LLMEngine, request_id: str, ids: Sequence[int], max_len: int, adapter: LoRARequest | None
) -> None:
    """Add a request for the log-probabilities of given tokens, at temperature 1 and over all tokens.

    vLLM computes them with the ``compute_logits`` with which it generates, so ids of the padding have probability 0. It
    computes all positions, and does not read its prefix cache.

    Args:
        max_len: Maximum length of a sequence, in tokens.
        adapter: See :func:`add_request`.

    Raises:
        WorkerError: There are fewer than two ids, or too many.
    """
    from recipe_gkd.rollout.vllm.compat import RequestOutputKind, SamplingParams

    if not 1 < len(ids) < max_len:
        raise WorkerError(
            f"log-probabilities of {len(ids)} tokens were requested; expected 2 to {max_len - 1} tokens",
            remedy=f"pass another sequence, or raise {_MAX_LENGTH}",
            keys=(_MAX_LENGTH,),
        )
    sampling = SamplingParams(
        temperature=0.0,  # of the one token that vLLM must generate
        max_tokens=1,
        prompt_logprobs=0,  # of the tokens of the prompt only
        skip_reading_prefix_cache=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(request_id, {"prompt_token_ids": list(ids)}, sampling, lora_request=adapter)


def to_log_probs(output: RequestOutput, version: int) -> list[float]:
    """Return the log-probability of each token of a prompt after the first. ``version`` is not used."""
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
    rest = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [float(by_id[token_id].logprob) for token_id, by_id in rest if by_id is not None]


def to_response(uid: int, output: RequestOutput, version: int) -> Response:
    """Convert the output of a finished request.

    Args:
        uid: Uid of the sample.
        output: Finished output.
        version: Current weights version of the engine, for a response without tokens.
    """
    from recipe_gkd.rollout.vllm.compat import FlatLogprobs

    completion = output.outputs[0]
    assert isinstance(completion.logprobs, FlatLogprobs)
    spans = completion.weight_versions or []
    versions_T = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
    logps_TX, ids_TX = _columns(completion.logprobs)
    return Response(
        uid=uid,
        ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.ascontiguousarray(logps_TX[:, 0]),
        finish_reason=completion.finish_reason or "length",
        weights_version=min(versions_T.tolist(), default=version),
        versions_T=versions_T.astype(np.int32),
        routed_experts_PX=None if completion.routed_experts is None else completion.routed_experts.astype(np.int16),
        student_ids_TJ=np.where(logps_TX > -np.inf, ids_TX, np.int32(-1))[:, 1:] if logps_TX.shape[1] > 1 else None,
    )


def _columns(logprobs: FlatLogprobs) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids of each token: the sampled one, then the likeliest in descending order, [T, X].

    A sampled token that is among the likeliest occurs twice. ``compat`` stores one array for each token.
    """
    if not len(logprobs):
        return np.zeros((0, 1), np.float32), np.zeros((0, 1), np.int32)
    return np.asarray(logprobs.logprobs, np.float32), np.asarray(logprobs.token_ids, np.int32)
