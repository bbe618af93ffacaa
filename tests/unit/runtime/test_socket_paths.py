from __future__ import annotations

import socket
from pathlib import Path

import pytest

from recipe_gkd.errors import ResourceError
from recipe_gkd.runtime import socket_paths
from recipe_gkd.runtime.socket_paths import _LONGEST_OF_RAY, shorten_socket_paths
from tests._support.errors import raises


def folder_of_length(tmp_path: Path, n_bytes: int) -> str:
    return str(tmp_path)[:1] + "x" * (n_bytes - 1)


class TestShortenSocketPaths:
    def test_short_folder_is_kept(self, tmp_path: Path) -> None:
        environment = {"TMPDIR": folder_of_length(tmp_path, 39)}
        assert shorten_socket_paths(environment) == [] and list(environment) == ["TMPDIR"]

    @pytest.mark.parametrize(
        ("length", "variables"), [(40, {"RAY_TMPDIR"}), (71, {"RAY_TMPDIR", "VLLM_RPC_BASE_PATH"})]
    )
    def test_long_folder_is_replaced_for_sockets_only(self, tmp_path: Path, length: int, variables: set[str]) -> None:
        environment = {"TMPDIR": (folder := folder_of_length(tmp_path, length))}
        messages = shorten_socket_paths(environment)
        assert environment == {"TMPDIR": folder} | dict.fromkeys(variables, "/tmp")
        assert f"TMPDIR={folder} has {length} bytes, but Ray's sockets need one of at most 39" in messages[0]
        assert len(messages) == len(variables) and "set RAY_TMPDIR" in messages[0]

    def test_long_folder_of_ray_is_refused_with_its_variable(self, tmp_path: Path) -> None:
        with raises(ResourceError, variable="RAY_TMPDIR"):
            shorten_socket_paths({"RAY_TMPDIR": folder_of_length(tmp_path, 50)})

    def test_long_folder_without_another_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket_paths, "SHORT_FOLDER", str(tmp_path / "missing"))
        with raises(ResourceError, variable="TMPDIR"):
            shorten_socket_paths({"TMPDIR": folder_of_length(tmp_path, 50)})

    def test_variables_of_the_user_are_kept(self, tmp_path: Path) -> None:
        own = {"RAY_TMPDIR": "/r", "VLLM_RPC_BASE_PATH": "/v", "TMPDIR": folder_of_length(tmp_path, 90)}
        environment = dict(own)
        assert shorten_socket_paths(environment) == [] and environment == own

    def test_limit_is_that_of_the_system(self) -> None:
        """A session of Ray with the largest process id and the longest accepted folder has a usable socket path."""
        name = "/" + "x" * 38 + "/" + _LONGEST_OF_RAY
        assert len(name) == socket_paths.MAX_PATH_BYTES
        with socket.socket(socket.AF_UNIX) as server:
            with pytest.raises(OSError, match="AF_UNIX path too long"):
                server.bind(name + "x")
            with pytest.raises(FileNotFoundError):
                server.bind(name)
