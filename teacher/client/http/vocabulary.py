"""Comparison of a server's tokenizer with a local one: each id must be the same text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from teacher.client.http.handshake import ServerModel
from teacher.client.http.servers import Server, Servers
from teacher.errors import TeacherRequestError, TeacherSetupError

CHUNK_IDS = 1024
CONCURRENT = 8


class _Text(msgspec.Struct):
    prompt: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class DetokenizeEndpoint:
    """Endpoint ``/detokenize`` of a server, which vLLM and SGLang have."""

    servers: Servers
    server: Server
    model: ServerModel

    async def text_of(self, ids: list[int]) -> str | None:
        """Return the text of ids; None if the server has no such endpoint.

        Raises:
            TeacherRequestError: The server refused the request.
        """
        content = await self.servers.post(self.server, "/detokenize", {"model": self.model.name, "tokens": ids})
        if content is None:
            return None
        try:
            reply = msgspec.json.decode(content, type=_Text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return reply.prompt if reply.prompt is not None else reply.text


async def check_vocabulary(endpoint: DetokenizeEndpoint, tokenizer: Any, n_ids: int, folder: str) -> bool:
    """Compare all ids of a local tokenizer, and check that the server has no further ones.

    Args:
        n_ids: Number of ids of the local tokenizer.
        folder: Folder of the local tokenizer, for messages.

    Returns:
        False if the server cannot decode ids, so that nothing was compared.

    Raises:
        TeacherSetupError: An id is another token, or the server has further tokens.
    """
    if await endpoint.text_of([0]) is None:
        return False
    size = max(1, min(CHUNK_IDS, endpoint.model.max_model_len))
    free = asyncio.Semaphore(CONCURRENT)

    async def first_difference(ids: list[int]) -> int | None:
        """Return the first id whose text differs."""
        async with free:
            text = await endpoint.text_of(ids)
        if text == tokenizer.decode(ids):
            return None
        if len(ids) == 1:
            return ids[0]
        for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
            if (found := await first_difference(half)) is not None:
                return found
        return None  # only the join differs

    chunks = [list(range(start, min(start + size, n_ids))) for start in range(0, n_ids, size)]
    found = [id_ for id_ in await asyncio.gather(*map(first_difference, chunks)) if id_ is not None]
    url = endpoint.server.endpoint.url
    if found:
        first = min(found)
        raise TeacherSetupError(
            f"the tokenizer of {url} differs from the one in {folder}: the id {first} is "
            f"{await endpoint.text_of([first])!r} there and {tokenizer.decode([first])!r} here",
            address=url,
            remedy="choose a student with the teacher's tokenizer, or set model_path to the folder with the teacher's",
        )
    if further := await _further_text(endpoint, n_ids):
        raise TeacherSetupError(
            f"the tokenizer of {url} has further tokens than the one in {folder}, from the id {n_ids} ({further!r}) "
            "on, and a server cannot exclude them from its distributions",
            address=url,
            remedy="use the teacher service with vocabulary=compatible, or a student with the teacher's tokenizer",
        )
    return True


async def _further_text(endpoint: DetokenizeEndpoint, n_ids: int) -> str:
    try:
        return await endpoint.text_of([n_ids]) or ""
    except TeacherRequestError:
        return ""
