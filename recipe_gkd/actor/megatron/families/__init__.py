"""Model families that the Megatron backend trains, one module for each line of models."""

from __future__ import annotations

from recipe_gkd.actor.megatron.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from recipe_gkd.actor.megatron.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from recipe_gkd.actor.megatron.families.exaone import EXAONE4
from recipe_gkd.actor.megatron.families.family import Family
from recipe_gkd.actor.megatron.families.gemma import GEMMA3
from recipe_gkd.actor.megatron.families.glm import GLM4, GLM4_MOE
from recipe_gkd.actor.megatron.families.gpt_oss import GPT_OSS
from recipe_gkd.actor.megatron.families.llama import LLAMA
from recipe_gkd.actor.megatron.families.minimax import MINIMAX_M2
from recipe_gkd.actor.megatron.families.mistral import MISTRAL, MIXTRAL
from recipe_gkd.actor.megatron.families.olmo import OLMO2, OLMO3, OLMOE
from recipe_gkd.actor.megatron.families.phi import PHI3
from recipe_gkd.actor.megatron.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from recipe_gkd.actor.megatron.families.seed import SEED_OSS
from recipe_gkd.actor.megatron.families.smollm import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        QWEN2, QWEN3, LLAMA, MISTRAL, SMOLLM3, PHI3, OLMO2, OLMO3, GEMMA3, GLM4, SEED_OSS, EXAONE4, ERNIE4_5,
        QWEN2_MOE, QWEN3_MOE, MIXTRAL, OLMOE, GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK_V2, DEEPSEEK_V3,
        GPT_OSS, MINIMAX_M2, ERNIE4_5_MOE,
    )
}  # fmt: skip
"""Families by ``model_type``. Qwen2.5 has the type qwen2, and Moonlight deepseek_v3."""
