"""Sizes of released models, for the table of what fits one GPU in ``docs/models.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POSITIONS = 32768


@dataclass(frozen=True)
class ReleasedModel:
    """Sizes in the ``config.json`` of a released model.

    Attributes:
        name: Name of the model.
        billions: Number of parameters of its text model, in billions, to one or two decimals.
        model_type: ``model_type`` of its text model.
        sizes: Other fields of ``config.json`` that determine the memory.
    """

    name: str
    billions: float
    model_type: str
    sizes: Mapping[str, Any] = field(repr=False)

    def write(self, folder: Path) -> Path:
        """Write a model folder without weights."""
        import transformers

        sizes = dict(max_position_embeddings=POSITIONS) | dict(self.sizes)
        config = transformers.AutoConfig.for_model(self.model_type, **sizes)
        architecture = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]
        folder.mkdir(parents=True)
        content = config.to_dict() | {"architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return folder


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return dict(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=False,
    ) | more  # fmt: skip


_TIED = dict(tie_word_embeddings=True)
_WIDE = dict(head_dim=128)

RELEASED_MODELS = (
    ReleasedModel("Qwen2.5-0.5B", 0.49, "qwen2", _sizes(896, 4864, 24, 14, 2, 151936, **_TIED)),
    ReleasedModel("Qwen2.5-1.5B", 1.54, "qwen2", _sizes(1536, 8960, 28, 12, 2, 151936, **_TIED)),
    ReleasedModel("Qwen2.5-7B", 7.62, "qwen2", _sizes(3584, 18944, 28, 28, 4, 152064)),
    ReleasedModel("Qwen2.5-32B", 32.8, "qwen2", _sizes(5120, 27648, 64, 40, 8, 152064)),
    ReleasedModel("Qwen3-0.6B", 0.60, "qwen3", _sizes(1024, 3072, 28, 16, 8, 151936, **_TIED, **_WIDE)),
    ReleasedModel("Qwen3-1.7B", 1.72, "qwen3", _sizes(2048, 6144, 28, 16, 8, 151936, **_TIED, **_WIDE)),
    ReleasedModel("Qwen3-4B", 4.02, "qwen3", _sizes(2560, 9728, 36, 32, 8, 151936, **_TIED, **_WIDE)),
    ReleasedModel("Qwen3-8B", 8.19, "qwen3", _sizes(4096, 12288, 36, 32, 8, 151936, **_WIDE)),
    ReleasedModel("Qwen3-14B", 14.8, "qwen3", _sizes(5120, 17408, 40, 40, 8, 151936, **_WIDE)),
    ReleasedModel("Qwen3-32B", 32.8, "qwen3", _sizes(5120, 25600, 64, 64, 8, 151936, **_WIDE)),
    ReleasedModel(
        "Qwen3-30B-A3B", 30.5, "qwen3_moe",
        _sizes(
            2048, 6144, 48, 32, 4, 151936, **_WIDE, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
        ),
    ),
    ReleasedModel("Llama-3.2-1B", 1.24, "llama", _sizes(2048, 8192, 16, 32, 8, 128256, **_TIED, head_dim=64)),
    ReleasedModel("Llama-3.2-3B", 3.21, "llama", _sizes(3072, 8192, 28, 24, 8, 128256, **_TIED, **_WIDE)),
    ReleasedModel("Llama-3.1-8B", 8.03, "llama", _sizes(4096, 14336, 32, 32, 8, 128256, **_WIDE)),
    ReleasedModel("Mistral-7B-v0.3", 7.25, "mistral", _sizes(4096, 14336, 32, 32, 8, 32768, **_WIDE)),
    ReleasedModel("Mistral-Small-24B", 23.6, "mistral", _sizes(5120, 32768, 40, 32, 8, 131072, **_WIDE)),
    ReleasedModel("Gemma-3-1B", 1.00, "gemma3_text", _sizes(1152, 6912, 26, 4, 1, 262144, **_TIED, head_dim=256)),
    ReleasedModel(
        "Gemma-3-4B (text)", 3.88, "gemma3_text", _sizes(2560, 10240, 34, 8, 4, 262208, **_TIED, head_dim=256)
    ),
    ReleasedModel("Phi-4-mini", 3.84, "phi3", _sizes(3072, 8192, 32, 24, 8, 200064, **_TIED)),
    ReleasedModel("Phi-4", 14.7, "phi3", _sizes(5120, 17920, 40, 40, 10, 100352)),
    ReleasedModel("SmolLM3-3B", 3.08, "smollm3", _sizes(2048, 11008, 36, 16, 4, 128256, **_TIED)),
    ReleasedModel("OLMo-2-7B", 7.30, "olmo2", _sizes(4096, 11008, 32, 32, 32, 100352)),
    ReleasedModel(
        "OLMoE-1B-7B", 6.92, "olmoe", _sizes(2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8)
    ),
    ReleasedModel("GLM-4-9B-0414", 9.40, "glm4", _sizes(4096, 13696, 40, 32, 2, 151552, **_WIDE, attention_bias=True)),
    ReleasedModel(
        "gpt-oss-20b", 20.9, "gpt_oss",
        _sizes(2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    ),
    ReleasedModel(
        "Moonlight-16B-A3B", 16.0, "deepseek_v3",
        _sizes(
            2048, 11264, 27, 16, 16, 163840, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
            num_experts_per_tok=6, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=None, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        ),
    ),
)  # fmt: skip
