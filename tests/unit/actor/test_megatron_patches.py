"""Redirection of CUDA devices to the CPU."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.actor.megatron.patches import on_host

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the redirection has no effect with a GPU")


class TestOnHost:
    def test_on_host_redirects_devices_and_type_names(self) -> None:
        with on_host():
            assert torch.zeros(2, device="cuda").device.type == torch.ones(2).cuda().device.type == "cpu"
            assert torch.zeros(2, device=torch.device("cuda", 1)).device.type == "cpu"
            assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
            assert torch.zeros(2).type(torch.float64).dtype == torch.float64
            with on_host():
                assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
