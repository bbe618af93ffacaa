"""Corrections of vLLM's CPU build: rotated heads, routers without groups, and the attention backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from teacher.common.vllm_cpu import correct_cpu_build, exact_attention

N, H, D, THETA = 7, 4, 16, 1e4


@pytest.fixture(scope="module", autouse=True)
def _corrected() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU build is not installed")
    correct_cpu_build()


def rotated(heads_NHD: Tensor) -> Tensor:
    """Return heads with neighboring channels rotated by the position."""
    angles_ND = torch.outer(torch.arange(N).float(), THETA ** -(torch.arange(0, D, 2) / D))
    pairs = torch.view_as_complex(heads_NHD.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles_ND), angles_ND)[:, None]).flatten(-2).float()


@pytest.mark.parametrize("is_strided", [False, True])
def test_heads_with_a_dimension_of_their_own_are_rotated(is_strided: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    torch.manual_seed(0)
    wide, key = torch.randn(N, H, D + 8), torch.randn(N, 1, D)
    query = wide[..., 8:] if is_strided else wide[..., 8:].contiguous()
    want = rotated(query), rotated(key)
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(D, D, 64, THETA, False, torch.float32)
        got = rope.forward_cpu(torch.arange(N), query, key)
        flat, _ = rope.forward_cpu(torch.arange(N), wide[..., 8:].flatten(1), None)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(flat.view(N, H, D), want[0])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_correction", [False, True])
def test_router_without_groups_uses_scores_and_correction(scoring: str, has_correction: bool) -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    torch.manual_seed(0)
    logits, correction = torch.randn(20, 6), torch.randn(6) if has_correction else None
    router = CPURouter(top_k=2, global_num_experts=6, scoring_func=scoring, e_score_correction_bias=correction)
    weights, ids = router._compute_routing(torch.zeros(20, 1), logits, None)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    want_ids = (scores if correction is None else scores + correction).topk(2).indices
    chosen = scores.gather(1, want_ids)
    want = torch.zeros(20, 6).scatter(1, want_ids, chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(torch.zeros(20, 6).scatter(1, ids.long(), weights), want)


def test_latent_attention_in_float32_uses_no_tiles_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    latent: Any = SimpleNamespace(use_mla=True, use_sparse=False)
    for dtype, want in ((torch.float32, "CPU_MLA"), (torch.bfloat16, "AMX_MLA")):
        name = exact_attention(SimpleNamespace(use_mla=True, dtype=dtype))
        chosen: Any = None if name is None else AttentionBackendEnum[name]
        assert CpuPlatform.get_attn_backend_cls(chosen, latent) == AttentionBackendEnum[want].get_path()
    assert exact_attention(SimpleNamespace(use_mla=False, dtype=torch.float32)) is None
