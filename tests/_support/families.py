"""Model families: a tiny configuration of each with all of its special features, and what is supported.

``tests/integration/families`` tests each row. ``docs/models.md`` shows the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests._support.causal_models import POSITIONS, VOCABULARY
from tests._support.qwen2 import EOS, save_word_tokenizer

NOT_IMPLEMENTED = "not implemented"
_TORCHVISION = "vLLM's module of the family imports torchvision, which the CPU environment does not have"
WINDOW = 6
"""Number of tokens of a sliding window, which is less than most samples have."""
_N_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models. A reason is a sentence part, and empty if the column works.

    Attributes:
        model_type: ``model_type`` of the text model in transformers.
        name: Name in the documentation.
        examples: Released models.
        config: Options of a tiny configuration of ``model_type``.
        note: Sentence about a difference that the columns do not show.
        rollout_config: Other options in the test of the rollout, because of ``note``.
        weight_scales: Part of the names of weights -> factor of their random values.
        megatron: Reason why ``strategy=megatron`` cannot train it.
        fsdp: Reason why ``strategy=fsdp`` cannot train it.
        lora: Reason why ``strategy=fsdp`` cannot train adapters of it.
        rollout: Reason why vLLM does not generate with it in the test, on a CPU.
        is_padded: True if sequences are padded, because they cannot be packed in one row.
        is_default: True if its tests run by default. The others are slow tests.
    """

    model_type: str
    name: str
    examples: str
    config: Mapping[str, Any] = field(repr=False)
    note: str = ""
    rollout_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    weight_scales: Mapping[str, float] = field(default_factory=dict, repr=False)
    megatron: str = NOT_IMPLEMENTED
    fsdp: str = ""
    lora: str = ""
    rollout: str = ""
    is_padded: bool = False
    is_default: bool = False

    @property
    def megatron_lora(self) -> str:
        """Reason why ``strategy=megatron`` cannot train adapters of it."""
        return self.megatron

    @property
    def teacher(self) -> str:
        """Reason why the teacher service does not serve it on a CPU: a teacher is an engine without weight syncs."""
        return self.rollout


_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=96, num_hidden_layers=_N_LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=POSITIONS, tie_word_embeddings=False, dtype="float32",
    pad_token_id=None, eos_token_id=EOS, bos_token_id=None,
)  # fmt: skip
_WIDE = dict(head_dim=64)
_TIED = dict(tie_word_embeddings=True)
_ROPE = dict(rope_type="default", rope_theta=1e4)
_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0
)
_LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
_SLIDING_AND_FULL = dict(
    sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
_ROUTED = _EXPERTS | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
_LATENT = dict(num_key_value_heads=4, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
"""Widths of the latent keys of the released models, the only ones that vLLM supports on a CPU."""
_GROUPED = dict(n_group=2, topk_group=1)
_DELTA_NET = dict(
    num_hidden_layers=4, head_dim=64, rope_parameters=_ROPE | {"partial_rotary_factor": 0.25},
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
)  # fmt: skip

FAMILIES = (
    Family(
        model_type="qwen2",
        name="Qwen2, Qwen2.5",
        examples="Qwen2.5-0.5B to 72B, DeepSeek-R1-Distill-Qwen",
        config=_SIZES | _TIED,
        megatron="",
    ),
    Family(
        model_type="qwen3",
        name="Qwen3",
        examples="Qwen3-0.6B to 32B",
        config=_SIZES | _TIED | _WIDE | dict(rope_parameters=_YARN),
        megatron="",
    ),
    Family(
        model_type="llama",
        name="Llama 2 to 3.3",
        examples="Llama-3.1-8B, Llama-3.2-1B, SmolLM2, DeepSeek-R1-Distill-Llama",
        config=_SIZES | dict(rope_parameters=_LLAMA3_ROPE),
        megatron="",
    ),
    Family(
        model_type="mistral",
        name="Mistral",
        examples="Mistral-7B, Mistral-Nemo, Mistral-Small-24B",
        config=_SIZES | _WIDE | dict(sliding_window=WINDOW),
        megatron="",
    ),
    Family(
        model_type="ministral3",
        name="Ministral 3 (text model)",
        examples="the text model of Ministral-3-3B to 14B",
        config=_SIZES
        | _WIDE
        | _TIED
        | dict(rope_parameters=_YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
        megatron="its queries have a factor that depends on their position",
    ),
    Family(
        model_type="gemma2",
        name="Gemma 2",
        examples="Gemma-2-2B to 27B",
        config=_SIZES
        | _TIED
        | _WIDE
        | _SLIDING_AND_FULL
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=48),
        megatron="its scores and logits have bounds",
    ),
    Family(
        model_type="gemma3_text",
        name="Gemma 3",
        examples="Gemma-3-270M, Gemma-3-1B, the text models of Gemma-3-4B to 27B",
        config=_SIZES
        | _TIED
        | _WIDE
        | _SLIDING_AND_FULL
        | dict(
            query_pre_attn_scalar=48,
            rope_parameters={
                "sliding_attention": _ROPE,
                "full_attention": dict(rope_type="linear", rope_theta=1e5, factor=8.0),
            },
        ),
        is_default=True,
        megatron="",
    ),
    Family(
        model_type="gemma4_text",
        name="Gemma 4",
        examples="the text models of Gemma-4-E2B, E4B, 26B-A4B and 31B",
        config=_SIZES
        | _TIED
        | _WIDE
        | dict(
            num_hidden_layers=5, sliding_window=WINDOW, global_head_dim=128, num_global_key_value_heads=1,
            layer_types=[
                "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention",
            ],
            attention_k_eq_v=True, num_kv_shared_layers=2, use_double_wide_mlp=True, final_logit_softcapping=5.0,
            hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY,
            enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        ),
        # Its scores are not divided by the root of the head width: the norms of queries have learned to.
        weight_scales={"q_norm": 0.1},
        megatron="each layer has another embedding of the tokens, and the last layers share keys and values",
    ),
    Family(
        model_type="glm4",
        name="GLM-4",
        examples="GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
        config=_SIZES | _WIDE | dict(attention_bias=True, rope_parameters=_ROPE | {"partial_rotary_factor": 0.5}),
        megatron="",
    ),
    Family(
        model_type="olmo2",
        name="OLMo 2",
        examples="OLMo-2-1B to 32B",
        config=_SIZES,
        megatron="",
    ),
    Family(
        model_type="olmo3",
        name="OLMo 3",
        examples="Olmo-3-7B, Olmo-3-32B",
        config=_SIZES | _SLIDING_AND_FULL | dict(rope_parameters={"sliding_attention": _ROPE, "full_attention": _YARN}),
        megatron="",
    ),
    Family(
        model_type="phi3",
        name="Phi-3, Phi-4",
        examples="Phi-3-mini-4k, Phi-4, Phi-4-mini",
        config=_SIZES | dict(sliding_window=WINDOW, rope_parameters=_ROPE | {"partial_rotary_factor": 0.75}),
        megatron="",
    ),
    Family(
        model_type="smollm3",
        name="SmolLM3",
        examples="SmolLM3-3B",
        config=_SIZES | _TIED | dict(no_rope_layers=[1, 0, 1]),
        megatron="",
    ),
    Family(
        model_type="granite",
        name="Granite 3",
        examples="Granite-3.3-2B, Granite-3.3-8B",
        config=_SIZES
        | _TIED
        | dict(
            embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.1,
        ),
        megatron="its residuals and logits have factors",
    ),
    Family(
        model_type="seed_oss",
        name="Seed-OSS",
        examples="Seed-OSS-36B",
        config=_SIZES | _WIDE | dict(attention_bias=True, attention_dropout=0.1, residual_dropout=0.1),
        megatron="",
    ),
    Family(
        model_type="cohere2",
        name="Command R7B, Command A",
        examples="c4ai-command-r7b-12-2024, c4ai-command-a-03-2025",
        config=_SIZES | _TIED | _SLIDING_AND_FULL | dict(logit_scale=0.25),
        note="vLLM's sliding window has one token more than transformers': both agree up to 4,096 tokens",
        rollout_config=dict(sliding_window=POSITIONS),
        megatron="its attention and feed-forward blocks are parallel, with LayerNorm",
    ),
    Family(
        model_type="exaone4",
        name="EXAONE 4.0",
        examples="EXAONE-4.0-1.2B, EXAONE-4.0-32B",
        config=_SIZES | _SLIDING_AND_FULL | dict(sliding_window_pattern="LG", rope_parameters=_LLAMA3_ROPE),
        megatron="",
    ),
    Family(
        model_type="ernie4_5",
        name="ERNIE 4.5 (dense)",
        examples="ERNIE-4.5-0.3B",
        config=_SIZES | _TIED | _WIDE,
        megatron="",
    ),
    Family(
        model_type="hunyuan_v1_dense",
        name="Hunyuan (dense)",
        examples="Hunyuan-0.5B to 7B-Instruct",
        config=_SIZES | _TIED | _WIDE | dict(attention_bias=True),
        megatron="it normalizes queries and keys after their rotation",
    ),
    Family(
        model_type="hunyuan_v1_moe",
        name="Hunyuan (mixture of experts)",
        examples="Hunyuan-A13B-Instruct",
        config=_SIZES | _TIED | _WIDE | dict(num_experts=4, moe_topk=2),
        megatron="it normalizes queries and keys after their rotation",
    ),
    Family(
        model_type="lfm2",
        name="LFM2",
        examples="LFM2-350M to 2.6B",
        config=_SIZES
        | _TIED
        | dict(
            block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3,
            conv_dim=128, block_dim=128,
        ),
        is_padded=True,
        megatron="it has convolution layers",
    ),
    Family(
        model_type="lfm2_moe",
        name="LFM2 (mixture of experts)",
        examples="LFM2-8B-A1B",
        config=_SIZES
        | _TIED
        | _EXPERTS
        | dict(
            layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, num_experts=4, num_dense_layers=1,
            routed_scaling_factor=1.5,
        ),
        is_padded=True,
        megatron="it has convolution layers",
    ),
    Family(
        model_type="granitemoehybrid",
        name="Granite 4",
        examples="Granite-4.0-Micro, H-Tiny and H-Small",
        config=_SIZES
        | _TIED
        | dict(
            num_hidden_layers=4, layer_types=["mamba", "attention", "mamba", "mamba"], num_local_experts=4,
            num_experts_per_tok=2, intermediate_size=32, shared_intermediate_size=48, position_embedding_type="nope",
            mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=16, mamba_d_head=32, mamba_chunk_size=8,
            embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.1,
        ),
        note="vLLM normalizes in `mamba_n_groups` groups, transformers all at once: both agree with one group",
        is_padded=True,
        megatron="it has state-space layers",
    ),
    Family(
        model_type="nemotron_h",
        name="Nemotron-H, Nemotron Nano 2 and 3",
        examples="Nemotron-H-8B, NVIDIA-Nemotron-Nano-9B-v2, NVIDIA-Nemotron-3-Nano-30B-A3B",
        config=_SIZES
        | _EXPERTS
        | dict(
            num_hidden_layers=4, head_dim=32, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, chunk_size=8, n_routed_experts=4,
            moe_shared_expert_intermediate_size=32, routed_scaling_factor=1.5,
        ),
        rollout="vLLM's CPU build has no experts without a gate (`is_act_and_mul=False`)",
        lora="peft refuses adapters on the layers `out_proj` of Mamba; name other layers in `lora.target_modules`",
        is_padded=True,
        megatron="it has state-space layers",
    ),
    Family(
        model_type="qwen3_next",
        name="Qwen3-Next",
        examples="Qwen3-Next-80B-A3B",
        config=_SIZES | _EXPERTS | _DELTA_NET | dict(num_experts=4, shared_expert_intermediate_size=32),
        rollout="vLLM's CPU build computes gated delta nets in bfloat16 only, in which the test cannot compare",
        is_padded=True,
        megatron="it has linear attention",
    ),
    Family(
        model_type="qwen3_5_text",
        name="Qwen3.5 (dense)",
        examples="the text models of Qwen3.5-0.8B to 27B",
        config=_SIZES | _TIED | _DELTA_NET,
        rollout=_TORCHVISION,
        is_padded=True,
        is_default=True,
        megatron="it has linear attention",
    ),
    Family(
        model_type="qwen3_5_moe_text",
        name="Qwen3.5 (mixture of experts)",
        examples="the text models of Qwen3.5-35B-A3B and larger",
        config=_SIZES | _EXPERTS | _DELTA_NET | dict(num_experts=4, shared_expert_intermediate_size=32),
        rollout=_TORCHVISION,
        is_padded=True,
        megatron="it has linear attention",
    ),
    Family(
        model_type="qwen2_moe",
        name="Qwen2-MoE",
        examples="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        config=_SIZES | _EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32),
        megatron="",
    ),
    Family(
        model_type="qwen3_moe",
        name="Qwen3-MoE",
        examples="Qwen3-30B-A3B, Qwen3-235B-A22B",
        config=_SIZES | _EXPERTS | _WIDE | dict(num_experts=4, mlp_only_layers=[1]),
        megatron="",
    ),
    Family(
        model_type="mixtral",
        name="Mixtral",
        examples="Mixtral-8x7B, Mixtral-8x22B",
        config=_SIZES | dict(num_experts_per_tok=2, num_local_experts=4),
        megatron="",
    ),
    Family(
        model_type="olmoe",
        name="OLMoE",
        examples="OLMoE-1B-7B",
        config=_SIZES | dict(num_experts_per_tok=2, num_experts=4),
        megatron="",
    ),
    Family(
        model_type="gpt_oss",
        name="gpt-oss",
        examples="gpt-oss-20b, gpt-oss-120b",
        config=_SIZES
        | _SLIDING_AND_FULL
        | dict(head_dim=32, num_experts_per_tok=2, num_local_experts=4, rope_parameters=_YARN | {"truncate": False}),
        megatron="",
    ),
    Family(
        model_type="glm4_moe",
        name="GLM-4.5, 4.6, 4.7",
        examples="GLM-4.5-Air, GLM-4.5, GLM-4.6",
        config=_SIZES
        | _ROUTED
        | _GROUPED
        | _WIDE
        | dict(
            use_qk_norm=True, attention_bias=True, rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
            routed_scaling_factor=1.5,
        ),
        megatron="",
    ),
    Family(
        model_type="glm4_moe_lite",
        name="GLM-4.7-Flash",
        examples="GLM-4.7-Flash",
        config=_SIZES
        | _ROUTED
        | _GROUPED
        | _LATENT
        | dict(q_lora_rank=16, routed_scaling_factor=1.5, mlp_layer_types=["dense", "sparse", "sparse"]),
        megatron="",
    ),
    Family(
        model_type="deepseek_v2",
        name="DeepSeek-V2",
        examples="DeepSeek-V2-Lite, DeepSeek-Coder-V2-Lite",
        config=_SIZES
        | _ROUTED
        | _GROUPED
        | _LATENT
        | dict(
            q_lora_rank=None, topk_method="group_limited_greedy", n_routed_experts=8, n_group=4, topk_group=2,
            rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        ),
        megatron="",
    ),
    Family(
        model_type="deepseek_v3",
        name="DeepSeek-V3, R1, Moonlight",
        examples="Moonlight-16B-A3B, DeepSeek-V3, DeepSeek-R1",
        config=_SIZES
        | _ROUTED
        | _GROUPED
        | _LATENT
        | dict(
            q_lora_rank=16, routed_scaling_factor=1.5, rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            topk_method="noaux_tc", scoring_func="sigmoid",
        ),
        is_default=True,
        megatron="",
    ),
    Family(
        model_type="ernie4_5_moe",
        name="ERNIE 4.5 (mixture of experts)",
        examples="ERNIE-4.5-21B-A3B",
        config=_SIZES
        | _TIED
        | dict(moe_intermediate_size=32, moe_k=2, moe_num_experts=4, moe_num_shared_experts=1, moe_layer_start_index=1),
        megatron="",
    ),
    Family(
        model_type="minimax_m2",
        name="MiniMax-M2",
        examples="MiniMax-M2",
        config=_SIZES
        | dict(
            head_dim=64, num_experts_per_tok=2, num_local_experts=4, rotary_dim=32, scoring_func="sigmoid",
            use_routing_bias=True,
            rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
        ),
        megatron="",
    ),
    Family(
        model_type="apertus",
        name="Apertus",
        examples="Apertus-8B, Apertus-70B",
        config=_SIZES | dict(rope_parameters=_LLAMA3_ROPE),
        megatron="its activation (xIELU) has trained parameters",
        rollout="vLLM's log-probabilities differ from transformers' by up to 0.0024",
    ),
    Family(
        model_type="exaone_moe",
        name="K-EXAONE",
        examples="K-EXAONE-236B-A23B",
        config=_SIZES
        | _EXPERTS
        | _SLIDING_AND_FULL
        | _GROUPED
        | _WIDE
        | dict(num_experts=4, num_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5),
    ),
    Family(
        model_type="hrm_text",
        name="HRM-Text",
        examples="HRM-Text",
        config=_SIZES,
        fsdp="transformers splits its stored weights when it loads them",
        lora="transformers splits its stored weights when it loads them",
        rollout="not tested, because no backend trains it",
        megatron="it repeats its layers",
    ),
)  # fmt: skip
"""Families in the order of the documentation."""
BY_TYPE = {family.model_type: family for family in FAMILIES}


def make_family_folder(path: Path, family: Family, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a folder with random weights of all kinds, also norms, biases and buffers.

    Args:
        path: Folder to create.
        family: Family with the configuration.
        changes: Options that replace those of the family.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type, **deepcopy(dict(family.config) | dict(changes or {})))
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, family)
    model.save_pretrained(path)
    save_word_tokenizer(path, [f"word{index}" for index in range(VOCABULARY - 3)])
    return path


@torch.no_grad()
def randomize(model: Any, family: Family) -> None:
    """Replace the initial values of all weights and buffers of a model."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        _randomize(name, tensor)
        if scales := [scale for part, scale in family.weight_scales.items() if part in name]:
            tensor.mul_(math.prod(scales))


def _randomize(name: str, tensor: torch.Tensor) -> None:
    """Replace the initial value of a tensor. Constants of recurrent layers only get noise."""
    if not tensor.is_floating_point():
        return
    if "norm" in name or name.endswith(("A_log", "dt_bias", ".D", "layer_scalar", "router.scale", "expert_scale")):
        tensor.add_(0.1 * torch.randn_like(tensor))
    elif tensor.ndim == 1:  # biases, sinks, and the correction of the router's scores, which is a buffer
        tensor.normal_(0, 0.1)
    else:
        tensor.normal_(0, 0.08)
