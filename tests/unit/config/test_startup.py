"""Deadline of the start, and environment variables of the workers."""

from __future__ import annotations

import pytest

from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.errors import ConfigError
from tests._support.base_config import base_config
from tests._support.errors import raises


@pytest.mark.parametrize(("overrides", "expected"), [((), (600, 1800)), (("trainer.startup_timeout_s=90",), (90, 90))])
def test_startup_timeout_by_default_allows_for_compilation_on_cuda(
    overrides: tuple[str, ...], expected: tuple[float, float]
) -> None:
    config = base_config(*overrides)
    assert (startup_timeout_s(config, "cpu"), startup_timeout_s(config, "cuda")) == expected


class TestEnvironmentVariables:
    def test_numbers_are_texts(self) -> None:
        config = base_config("ray_init.env_vars={NCCL_IB_DISABLE: 1, NCCL_SOCKET_IFNAME: eth0}")
        assert config.ray_init.env_vars == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}

    def test_boolean_is_refused(self) -> None:
        with raises(ConfigError, keys=("ray_init.env_vars.NCCL_IB_DISABLE",)):
            base_config("ray_init.env_vars.NCCL_IB_DISABLE=true")

    @pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP"])
    def test_variable_that_cannot_be_shared_is_refused(self, name: str) -> None:
        with raises(ConfigError, keys=(f"ray_init.env_vars.{name}",)):
            base_config(f"ray_init.env_vars.{name}=1")
