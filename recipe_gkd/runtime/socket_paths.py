"""Folders of Unix sockets. The path of a socket has at most 107 bytes, and a temporary folder can be longer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping

from recipe_gkd.errors import ResourceError

MAX_PATH_BYTES = 107
SHORT_FOLDER = "/tmp"
_LONGEST_OF_RAY = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_OF_VLLM = "00000000-0000-0000-0000-000000000000"


def shorten_socket_paths(environment: MutableMapping[str, str]) -> list[str]:
    """Set variables with which Ray and vLLM put their sockets into a short folder, where ``TMPDIR`` is too long.

    Args:
        environment: Variables of this process, which Ray and the workers inherit. Variables that are set are kept.

    Returns:
        Sentences about the folders that were changed.

    Raises:
        ResourceError: ``RAY_TMPDIR`` is too long, or no short folder can be written.
    """
    changes = []
    temporary = environment.get("TMPDIR") or tempfile.gettempdir()
    chosen = environment.get("RAY_TMPDIR")
    if _is_too_long(chosen or temporary, _LONGEST_OF_RAY):
        limit = MAX_PATH_BYTES - len(f"/{_LONGEST_OF_RAY}")
        variable = "RAY_TMPDIR" if chosen else "TMPDIR"
        found = f"{variable}={chosen or temporary}"
        expected = (
            f"{found} has {len(os.fsencode(chosen or temporary))} bytes, but Ray's sockets need one of at most {limit}"
        )
        if chosen or not os.access(SHORT_FOLDER, os.W_OK | os.X_OK):
            remedy = "set RAY_TMPDIR to a shorter folder that can be written"
            raise ResourceError(expected, remedy=remedy, variable=variable)
        environment["RAY_TMPDIR"] = SHORT_FOLDER
        changes.append(
            f"{expected}: Ray's logs, sockets and spilled objects are in {SHORT_FOLDER}/ray; set RAY_TMPDIR to choose "
            "another folder"
        )
    if _is_too_long(temporary, _LONGEST_OF_VLLM) and "VLLM_RPC_BASE_PATH" not in environment:
        environment["VLLM_RPC_BASE_PATH"] = SHORT_FOLDER
        changes.append(f"TMPDIR={temporary} is too long for the sockets of vLLM, which are in {SHORT_FOLDER}")
    return changes


def _is_too_long(folder: str, name: str) -> bool:
    return len(os.fsencode(f"{folder}/{name}")) > MAX_PATH_BYTES
