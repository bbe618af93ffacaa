"""Logits in chunks equal those of the whole model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, OPTConfig, PhiConfig

from recipe_gkd.teachers.chunked_model import ChunkedModel
from teacher.errors import TeacherSetupError
from tests._support.errors import raises

CONFIGS = [
    Gemma2Config(
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 0.5},
    ),
    GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2),
    OPTConfig(
        **{"vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "word_embed_proj_dim": 32},
    ),
    PhiConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
]
"""Models with a cap on the logits, with tied embeddings, with a decoder inside the base model, and with a bias."""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_logits_in_chunks_equal_those_of_the_model(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids_RS = torch.randint(3, 96, (2, 17))
    mask_RS = torch.ones_like(ids_RS)
    mask_RS[1, 9:] = 0
    with torch.inference_mode():
        expected_RSV = model(input_ids=ids_RS, attention_mask=mask_RS, use_cache=False).logits
        chunked = ChunkedModel(model)
        hidden_RSD = chunked.hidden_states(ids_RS, mask_RS)
        for row, n_tokens in ((0, 17), (1, 9)):
            logits_TV = torch.cat([chunked.logits(hidden_TD) for hidden_TD in hidden_RSD[row, :n_tokens].split(5)])
            torch.testing.assert_close(logits_TV, expected_RSV[row, :n_tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_logits_of_16_bit_model_are_not_rounded(config: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    ids_RS = torch.randint(3, 96, (1, 17))
    with torch.inference_mode():
        chunked = ChunkedModel(model)
        [hidden_TD] = chunked.hidden_states(ids_RS, torch.ones_like(ids_RS))
        expected_TV = ChunkedModel(deepcopy(model).float()).logits(hidden_TD.float())
        logits_TV = chunked.logits(hidden_TD)
    assert hidden_TD.dtype == dtype and logits_TV.dtype == torch.float32
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-6, rtol=0)


def test_model_without_output_layer_is_refused() -> None:
    class Headless:
        def get_output_embeddings(self) -> None:
            return None

    with raises(TeacherSetupError, options=("actor_rollout_ref.teacher.backend",)):
        ChunkedModel(Headless())
