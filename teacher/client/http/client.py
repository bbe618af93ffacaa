"""`HttpTeacherClient`, the client of plain inference servers as one teacher."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from teacher.client.arguments import normalize_sequences
from teacher.client.http.handshake import ServerModel, check_same, probe, read_model
from teacher.client.http.scoring_api import without_padding
from teacher.client.http.servers import (
    CONNECT_TIMEOUT_S,
    ConnectionLost,
    Endpoint,
    Server,
    ServerFault,
    ServerFull,
    Servers,
    ensure_verified,
)
from teacher.client.http.vocabulary import DetokenizeEndpoint, check_vocabulary
from teacher.common.checkpoint import read_eos_token_ids
from teacher.common.fingerprint import count_ids, last_tokens, tokenizer_fingerprint
from teacher.errors import TeacherChanged, TeacherClosed, TeacherError, TeacherRequestError, TeacherSetupError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from teacher.wire.auth import is_loopback
from teacher.wire.limits import PROTOCOL_VERSION
from teacher.wire.request_checks import check_temperature

R = TypeVar("R")

logger = logging.getLogger(__name__)

DEFAULT_TOP_K = 256
DEFAULT_CONNECTIONS = 64
CLOSE_TIMEOUT_S = 10.0
_ROW_ENTRY_BYTES = 8  # an int32 id and a float32 log-probability


@dataclass(frozen=True)
class HttpClientSpec:
    """Description of a client that can be sent to another process. It contains the API keys.

    Attributes:
        endpoints: Servers of the teacher.
        tokenizer_path: Folder of the local tokenizer.
        requires_same_tokenizer: See `HttpTeacherClient`.
        timeout_s: Default time limit of a call, in seconds.
        top_k: Number of log-probabilities per position, None for the default.
        served_model_name: Name of the model at the servers, None for their only one.
        n_connections: Maximum number of open requests at one server.
        model: The only model that the client accepts, None for any.
        reference_T: Log-probabilities of the probe by that model.
    """

    endpoints: tuple[Endpoint, ...]
    tokenizer_path: str
    requires_same_tokenizer: bool = True
    timeout_s: float = 600.0
    top_k: int | None = None
    served_model_name: str | None = None
    n_connections: int = DEFAULT_CONNECTIONS
    model: TeacherInfo | None = None
    reference_T: np.ndarray | None = field(default=None, compare=False)

    @property
    def is_loopback(self) -> bool:
        """True if only processes of a server's own machine can reach it."""
        return any(is_loopback(endpoint.host) for endpoint in self.endpoints)

    @property
    def n_columns(self) -> int:
        """Size of the top k of one position."""
        return self.top_k or (DEFAULT_TOP_K if self.model is None else self.model.n_logprobs)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an id with its log-probability."""
        return _ROW_ENTRY_BYTES

    def open(self) -> HttpTeacherClient:
        """Return a new client that fits this description."""
        return HttpTeacherClient(self)


class HttpTeacherClient:
    """Thread-safe client of inference servers that serve one teacher: ``vllm serve`` or SGLang.

    Each sequence is one request of token ids. Requests go to the server with the fewest open ones, and are repeated
    until their deadline if a server is lost or full. Before its first request, and after each lost connection, a server
    is verified: model, limits, and the log-probabilities of a fixed sequence. The first one is also compared with the
    local tokenizer, id by id.

    Example::

        client = HttpTeacherClient(HttpClientSpec((Endpoint("http://10.0.0.1:8000"),), "/models/teacher"))
        info = client.hello()
        scored = client.submit(sequences).result()
        client.close()

    Attributes:
        address: Base URLs of the servers.
    """

    def __init__(self, spec: HttpClientSpec) -> None:
        """Start the thread of the requests. The servers are not contacted yet.

        Args:
            spec: Servers and settings. With ``requires_same_tokenizer``, servers that cannot decode ids are refused;
                otherwise their tokenizer is not compared.
        """
        self._spec = spec
        self._info, self._reference_T = spec.model, spec.reference_T
        self._models: dict[Server, ServerModel] = {}
        self._closing = False
        self.address = ", ".join(endpoint.url for endpoint in spec.endpoints)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-teacher", daemon=True)
        self._thread.start()
        self._session, self._servers, self._pin_lock = self._start(self._connect()).result(CONNECT_TIMEOUT_S)

    async def _connect(self) -> tuple[aiohttp.ClientSession, Servers, asyncio.Lock]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), trust_env=True)
        return session, Servers(session, list(self._spec.endpoints), self._spec.n_connections), asyncio.Lock()

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """Return the model and limits of the servers. From then on the client accepts only this model.

        Args:
            timeout_s: Time limit in seconds, or None for the client's default.

        Raises:
            TeacherUnreachable: No server can be reached.
            TeacherSetupError: A server has another format, limit, tokenizer or kind of scores.
            TeacherTimeout: The servers did not answer in time.
        """
        return self.submit_hello(timeout_s).result()

    def submit_hello(self, timeout_s: float | None = None) -> Future[TeacherInfo]:
        """Return the future of `hello`."""
        return self._start(self._hello(self._spec.timeout_s if timeout_s is None else timeout_s))

    def submit(
        self,
        sequences: Sequence[TeacherSequence],
        timeout_s: float | None = None,
        *,
        temperature: float = 1.0,
        as_float32: bool = True,
    ) -> Future[list[ScoredSequence]]:
        """Request the teacher's distributions.

        Args:
            sequences: Sequences to score.
            timeout_s: Time limit in seconds, or None for the client's default.
            temperature: Must be 1: the servers return log-probabilities at temperature 1.
            as_float32: Without effect, the log-probabilities are float32.

        Returns:
            Future of the scored sequences. It can be canceled. It fails with `TeacherRequestError` (a sequence is
            invalid, or was refused), `TeacherTimeout`, `TeacherUnavailable`, `TeacherChanged` or `TeacherSetupError`.

        Raises:
            TeacherClosed: The client is closed.
        """
        return self._start(
            self._score(sequences, self._spec.timeout_s if timeout_s is None else timeout_s, temperature)
        )

    def restrict_ids(self, n_ids: int) -> None:
        """Refuse to exclude ids from the distributions, for which a server of text has no parameter.

        Raises:
            TeacherSetupError: ``n_ids`` is not 0.
        """
        if n_ids:
            raise TeacherSetupError(
                f"the servers at {self.address} cannot exclude the ids from {n_ids} on from their distributions",
                remedy="use the teacher service, which can, or a student with the teacher's tokenizer",
            )

    def spec(self) -> HttpClientSpec:
        """Return what another process needs to open an equal client, which accepts only the model of `hello`."""
        model = None if self._info is None else replace(self._info, last_tokens=())
        return replace(self._spec, model=model, reference_T=self._reference_T)

    def close(self) -> None:
        """Fail the open calls and free the connections. Further calls have no effect."""
        if self._closing:
            return
        self._closing = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    async def _close(self) -> None:
        calls = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._session.close()

    def _start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        if self._closing:
            work.close()
            raise TeacherClosed("the client is closed", address=self.address)
        return asyncio.run_coroutine_threadsafe(self._unless_closed(work), self._loop)

    async def _unless_closed(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            return await work
        except asyncio.CancelledError:
            if self._closing:
                raise TeacherClosed("the client was closed", address=self.address) from None
            raise

    async def _hello(self, timeout_s: float) -> TeacherInfo:
        deadline = time.monotonic() + timeout_s
        await self._servers.run(_no_request, self._verify, deadline, timeout_s)
        others = [server for server in self._servers.all if not server.is_verified]
        await asyncio.gather(*(self._verify_other(server, deadline) for server in others))
        assert self._info is not None, "set by the first verification"
        return replace(self._info, n_workers=sum(server.is_verified for server in self._servers.all))

    async def _verify_other(self, server: Server, deadline: float) -> None:
        """Verify a further server. One that cannot be reached, or hangs, is left out until it can."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await ensure_verified(server, self._verify)
        except (ConnectionLost, ServerFull, ServerFault, TimeoutError) as error:
            server.pause()
            reason = error if str(error) else "it did not answer in time"
            logger.warning("the teacher's server %s gets no requests yet: %s", server.endpoint.url, reason)

    async def _verify(self, server: Server) -> None:
        """Verify a server before it gets requests. The first one determines the model of this client."""
        model = await read_model(self._servers, server, self._spec.served_model_name)
        if self._info is None:
            async with self._pin_lock:
                if self._info is None:
                    self._info, self._models[server] = await self._pin(server, model)
                    return
        model, scored = await probe(self._servers, server, model, self._info.n_tokens, self._info.n_logprobs)
        self._check_same(server, model, self._info, scored)
        self._models[server] = model

    async def _pin(self, server: Server, model: ServerModel) -> tuple[TeacherInfo, ServerModel]:
        """Return the description of the first server's model, and the model with its format."""
        from teacher.common.tokenizer import load_tokenizer  # with transformers

        folder = self._spec.tokenizer_path
        tokenizer = await asyncio.to_thread(load_tokenizer, folder, "model_path")
        n_tokens = count_ids(tokenizer)
        top_k = min(DEFAULT_TOP_K, n_tokens) if self._spec.top_k is None else self._spec.top_k
        model, scored = await probe(self._servers, server, model, n_tokens, top_k)
        endpoint = DetokenizeEndpoint(self._servers, server, model)
        if not await check_vocabulary(endpoint, tokenizer, n_tokens, folder):
            self._accept_unknown_tokenizer(server)
        self._reference_T = scored.sampled_logps_T
        info = TeacherInfo(
            model_name=model.name,
            vocab_size=n_tokens,
            n_tokens=n_tokens,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            max_model_len=model.max_model_len,
            n_logprobs=top_k,
            engine=f"{model.engine} over HTTP ({model.api.path})",
            eos_token_ids=_eos_token_ids(Path(folder), tokenizer),
            last_tokens=last_tokens(tokenizer),
            protocol_version=PROTOCOL_VERSION,
            n_workers=len(self._servers.all),
        )
        return info, model

    def _accept_unknown_tokenizer(self, server: Server) -> None:
        url, folder = server.endpoint.url, self._spec.tokenizer_path
        if self._spec.requires_same_tokenizer:
            raise TeacherSetupError(
                f"{url} has no endpoint /detokenize, so its tokenizer cannot be compared with the student's",
                address=url,
                remedy="set model_path to a folder with the teacher's tokenizer",
            )
        logger.warning("%s has no endpoint /detokenize; its tokenizer is assumed to be the one in %s", url, folder)

    def _check_same(self, server: Server, model: ServerModel, info: TeacherInfo, scored: ScoredSequence) -> None:
        if (model.name, model.max_model_len) != (info.model_name, info.max_model_len):
            raise TeacherChanged(
                f"{server.endpoint.url} serves {model.name}, up to {model.max_model_len} tokens long, expected "
                f"{info.model_name}, up to {info.max_model_len}",
                address=server.endpoint.url,
                remedy="serve the same model at all URLs during a run",
            )
        if self._reference_T is not None:
            check_same(self._reference_T, scored.sampled_logps_T, server)

    async def _score(
        self, sequences: Sequence[TeacherSequence], timeout_s: float, temperature: float
    ) -> list[ScoredSequence]:
        if check_temperature(temperature) != 1.0:
            raise TeacherRequestError(
                f"temperature {temperature:g}: the servers return log-probabilities at temperature 1",
                argument="temperature",
                remedy="use the teacher service or backend=hf for other temperatures",
            )
        normalized, deadline = normalize_sequences(sequences), time.monotonic() + timeout_s
        if any(sequence.n_support or not sequence.with_top_k for sequence in normalized):
            raise TeacherRequestError(
                "support_ids_TJ: the servers return log-probabilities of their own top k only",
                argument="support_ids_TJ",
                options=("actor_rollout_ref.teacher.support",),
                remedy="set actor_rollout_ref.teacher.support=teacher, or use the teacher service or backend=hf",
            )
        calls = [
            asyncio.ensure_future(self._score_one(position, sequence, deadline, timeout_s))
            for position, sequence in enumerate(normalized)
        ]
        try:
            return list(await asyncio.gather(*calls))
        except TeacherError as error:
            raise error.replaced(operation=f"scoring {len(normalized)} sequences") from error.__cause__
        finally:
            for call in calls:
                call.cancel()  # without effect if it is done

    async def _score_one(
        self, position: int, sequence: TeacherSequence, deadline: float, timeout_s: float
    ) -> ScoredSequence:
        async def send(server: Server) -> ScoredSequence:
            model, info = self._models[server], self._info
            assert info is not None, "the server is verified"
            if len(sequence.token_ids) > info.max_model_len:
                raise TeacherRequestError(
                    f"{len(sequence.token_ids)} tokens, expected at most {info.max_model_len}: the server's "
                    "max_model_len less one, as it generates a token",
                    argument="token_ids",
                )
            content = await self._servers.post(
                server, model.api.path, model.api.body(sequence, info.n_logprobs, model.name)
            )
            if content is None:
                what = f"{server.endpoint.url} has no {model.api.path} any more"
                raise TeacherChanged(what, address=server.endpoint.url)
            return without_padding(model.api.scores(content, sequence, info.n_logprobs), info.n_tokens)

        try:
            return await self._servers.run(send, self._verify, deadline, timeout_s)
        except TeacherError as error:
            raise error.replaced(sequence=position) from error.__cause__


async def _no_request(server: Server) -> None:
    """Send nothing: the server was verified."""


def _eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a turn: those that the folder's files declare, or else the tokenizer's."""
    if declared := read_eos_token_ids(folder, "model_path"):
        return declared
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
