"""HTTP servers in threads of the test process that score sequences with a random table, and that fail on request."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from aiohttp import web

from tests._support.ports import free_port
from tests._support.waiting import PATIENCE_S

VOCAB_SIZE = 40
MAX_LOGPROBS = 20
DECODED = [f"t{i} " for i in range(VOCAB_SIZE)]


def table(seed: int) -> np.ndarray:
    """Return log-probabilities of the next id for each id, float32 [V, V]. One of them is -inf."""
    logits = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 3
    logits[:, 5] = -np.inf
    return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)), np.float32)


class TableTokenizer:
    """Tokenizer whose id i has the text ``t<i> ``."""

    eos_token_id = 1

    def __init__(self, size: int = VOCAB_SIZE) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(self._size)}

    def decode(self, ids: list[int]) -> str:
        return "".join(DECODED[i] for i in ids)


class TableServer:
    """Server of a table. Attributes may be changed while it runs.

    Attributes:
        port: Port of the server.
        kind: ``completions``, ``generate`` (``vllm serve --tokens-only``) or ``sglang``.
        logps_VV: The table.
        failures: Responses to the next scoring requests instead of scores: status, headers and body. ``None`` instead
            of a response closes the connection.
        delay_s: Time until a response to a scoring request.
        decoded: Texts of the ids.
        n_scored: Number of scored requests.
        keys: Values of the header ``Authorization`` of all requests.
    """

    def __init__(self, port: int, kind: str = "completions", seed: int = 0) -> None:
        self.port, self.kind, self.logps_VV = port, kind, table(seed)
        self.model, self.max_model_len, self.max_logprobs = "table", 65, MAX_LOGPROBS
        self.failures: list[tuple[int, dict[str, str], bytes] | None] = []
        self.delay_s, self.n_scored = 0.0, 0
        self.decoded: list[str] | None = DECODED
        self.offset = 0.0
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        paths = {"completions": "/v1/completions", "generate": "/inference/v1/generate", "sglang": "/generate"}
        application.router.add_post(paths[self.kind], self._score)
        if self.decoded is not None:
            application.router.add_post("/detokenize", self._detokenize)
        return application

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        model = {"id": self.model, "root": "/models/table", "parent": None, "max_model_len": self.max_model_len}
        owner = "sglang" if self.kind == "sglang" else "vllm"
        adapter = {"id": "adapter", "root": "/models/adapter", "parent": "table", "owned_by": owner}
        return web.json_response({"object": "list", "data": [model | {"owned_by": owner}, adapter]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        assert self.decoded is not None
        ids = (await request.json())["tokens"]
        if any(token >= len(self.decoded) for token in ids):
            return web.json_response({"error": {"message": "out of vocabulary"}}, status=400)
        return web.json_response({"prompt": "".join(self.decoded[token] for token in ids)})

    async def _score(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.failures:
            failure = self.failures.pop(0)
            if failure is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            status, headers, content = failure
            return web.Response(status=status, headers=headers, body=content)
        await asyncio.sleep(self.delay_s)
        self.n_scored += 1
        if self.kind == "sglang":
            return web.json_response(self._sglang(body))
        sampling = body.get("sampling_params", body)
        k = sampling["prompt_logprobs"]
        if k > self.max_logprobs:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        ids = body["token_ids"] if self.kind == "generate" else body["prompt"]
        positions = [None, *(self._entries(before, token, k) for before, token in itertools.pairwise(ids))]
        if self.kind == "generate":
            return web.json_response({"request_id": "1", "choices": [], "prompt_logprobs": positions})
        return web.json_response({"model": self.model, "choices": [{"index": 0, "prompt_logprobs": positions}]})

    def _top(self, before: int, k: int) -> list[int]:
        return [int(token) for token in np.argsort(-self.logps_VV[before], kind="stable")[:k]]

    def _logp(self, before: int, token: int) -> float:
        return max(-9999.0, float(self.logps_VV[before, token])) + self.offset

    def _entries(self, before: int, token: int, k: int) -> dict[int, dict[str, Any]]:
        rank = 1 + int((self.logps_VV[before] > self.logps_VV[before, token]).sum())
        entries = {token: {"logprob": self._logp(before, token), "rank": rank, "decoded_token": "x"}}
        for position, other in enumerate(self._top(before, k), start=1):
            entries[other] = {"logprob": self._logp(before, other), "rank": position, "decoded_token": "x"}
        return entries

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        pairs = list(zip(ids[start:], ids[start + 1 :], strict=False))
        tokens = [[None, ids[start], None], *([self._logp(a, b), b, None] for a, b in pairs)]
        top = [None, *([[self._logp(a, other), other, None] for other in self._top(a, k)] for a, _ in pairs)]
        meta = {"input_token_logprobs": tokens, "input_top_logprobs": top, "prompt_tokens": len(ids)}
        return {"text": "", "meta_info": meta}


@contextmanager
def running(server: TableServer) -> Iterator[TableServer]:
    """Run a server in a thread."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", server.port).start()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


@contextmanager
def table_server(kind: str = "completions", seed: int = 0) -> Iterator[TableServer]:
    """Run a server of a random table on a free port."""
    with running(TableServer(free_port(), kind, seed)) as server:
        yield server
