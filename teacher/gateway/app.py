"""Endpoints of the gateway.

=========================  =================================================================================
``POST /v1/completions``   scores of sequences of token ids
``GET /v1/models``         name and limits of the teacher
``GET /health``            200 if the service has a worker, else 503
=========================  =================================================================================
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from teacher.client import AsyncTeacherClient
from teacher.errors import TeacherError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.gateway.completions import read_request, response_body, sequences_of
from teacher.records import TeacherInfo

MAX_BODY_BYTES = 64 << 20
RETRY_AFTER_S = 1
OWNER = "recipe_gkd"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Handlers of the endpoints.

    Args:
        client: Client of the teacher service.
        timeout_s: Time limit of a request, in seconds.
        api_key: Key that requests need in the header ``Authorization: Bearer``. Empty: none.
    """

    def __init__(self, client: AsyncTeacherClient, *, timeout_s: float, api_key: str = "") -> None:
        self._client, self._timeout_s, self._api_key = client, timeout_s, api_key

    def application(self) -> web.Application:
        """Return the web application."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._complete)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and answer the errors of the service as vLLM does."""
        expected = f"Bearer {self._api_key}".encode()
        given = request.headers.get("Authorization", "").encode()
        if self._api_key and request.path != "/health" and not hmac.compare_digest(given, expected):
            return _error(401, "the request has no valid API key")
        try:
            return await handler(request)
        except TeacherRequestError as error:
            return _error(400, str(error))
        except TeacherTimeout as error:
            return _error(504, str(error))
        except TeacherUnavailable as error:
            return _error(503, str(error), {"Retry-After": str(RETRY_AFTER_S)})
        except TeacherError as error:
            return _error(500, str(error))

    async def _health(self, request: web.Request) -> web.Response:
        status = await self._client.status()
        return web.Response(status=200 if status.workers else 503)

    async def _models(self, request: web.Request) -> web.Response:
        info = await self._info()
        model = {"id": info.model_name, "object": "model", "owned_by": OWNER, "max_model_len": info.max_model_len}
        return _json({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.Response:
        info = await self._info()
        asked = read_request(await request.read(), info)
        sequences = sequences_of(asked)
        scored = await self._client.score(sequences, self._timeout_s)
        return web.Response(body=response_body(asked, info, sequences, scored), content_type="application/json")

    async def _info(self) -> TeacherInfo:
        return await self._client.hello(self._timeout_s)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json({"error": {"message": message, "type": "TeacherError", "code": status}}, status, headers)
