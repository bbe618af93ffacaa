"""Requests of a rollout engine: conversion from prompts and to responses, and the requests in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import GkdError, WorkerError

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm_compat import LLMEngine, RequestOutput

Deliver = Callable[[list[Response] | GkdError], None]
"""Callback on the engine's thread: it gets the responses that have just finished, or once the error that ended all."""


class RequestTable:
    """Requests in flight, with the uid and the callback of each."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, Deliver]] = {}
        self._numbers = itertools.count()

    def new_ids(self, n: int) -> list[str]:
        """Return ``n`` request ids that were not used before."""
        return [str(next(self._numbers)) for _ in range(n)]

    def ids(self) -> list[str]:
        """Return the ids of all requests in flight."""
        return list(self._requests)

    def add(self, request_id: str, uid: int, deliver: Deliver) -> None:
        """Register a request."""
        self._requests[request_id] = uid, deliver

    def remove(self, request_ids: Sequence[str]) -> list[str]:
        """Remove requests, and return the ids of those that were in flight."""
        return [request_id for request_id in request_ids if self._requests.pop(request_id, None)]

    def deliver_finished(self, outputs: Sequence[RequestOutput], version: int) -> None:
        """Remove finished requests, and pass their responses to their callbacks.

        Args:
            outputs: Finished outputs of one engine step.
            version: Weights version of the engine.
        """
        finished: dict[Deliver, list[Response]] = {}
        for output in outputs:
            if owner := self._requests.pop(output.request_id, None):
                uid, deliver = owner
                finished.setdefault(deliver, []).append(to_response(uid, output, version))
        for deliver, responses in finished.items():
            deliver(responses)

    def fail_all(self, failure: GkdError) -> None:
        """Remove all requests, and pass ``failure`` once to each callback. Safe while another thread delivers."""
        owners: dict[Deliver, None] = {}
        while self._requests:
            with suppress(KeyError):
                owners[self._requests.popitem()[1][1]] = None
        for deliver in owners:
            deliver(failure)


def add_request(engine: LLMEngine, request_id: str, prompt: Prompt, params: dict[str, Any], max_len: int) -> None:
    """Add a prompt to an engine.

    Args:
        engine: The engine.
        request_id: Id of the request.
        prompt: The prompt.
        params: Keyword arguments of vLLM's ``SamplingParams``.
        max_len: Maximum length of a sequence, in tokens.

    Raises:
        WorkerError: The prompt is empty, or leaves no room for a response.
    """
    from recipe_gkd.rollout.vllm_compat import RequestOutputKind, SamplingParams

    if not 0 < len(prompt.ids) < max_len:
        raise WorkerError(
            f"prompt {prompt.uid} (row {prompt.row}) has {len(prompt.ids)} tokens; expected 1 to {max_len - 1}, which "
            "leaves room for one response token; raise actor_rollout_ref.rollout.max_model_len, or remove the row"
        )
    sampling = SamplingParams(
        **params,
        detokenize=False,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt.ids.tolist()}, sampling)


def to_response(uid: int, output: RequestOutput, version: int) -> Response:
    """Convert the output of a finished request.

    Args:
        uid: Uid of the sample.
        output: Finished output.
        version: Current weights version of the engine, for a response without tokens.
    """
    from recipe_gkd.rollout.vllm_compat import FlatLogprobs

    completion = output.outputs[0]
    assert isinstance(completion.logprobs, FlatLogprobs)
    spans = completion.weight_versions or []
    versions_T = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
    return Response(
        uid=uid,
        ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        finish_reason=completion.finish_reason or "length",
        weights_version=min(versions_T.tolist(), default=version),
        versions_T=versions_T.astype(np.int32),
    )
