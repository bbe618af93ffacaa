"""Report of the modules that the layers of the actor use, for the log of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from recipe_gkd.actor.megatron.packed_attention import attention_kernel
from recipe_gkd.actor.megatron.transformer_impl import INSTALL, KEY, installed_version, version_warning
from recipe_gkd.config.schema.actor import TransformerImpl


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Modules of the layers.

    Attributes:
        summary: One line: package, attention kernel, and grouped GEMM of the experts.
        warnings: What makes the actor slow or is untested, with the remedy.
    """

    summary: str
    warnings: list[str]


def layer_report(config: TransformerConfig, setting: TransformerImpl, local_feature: str = "") -> LayerReport:
    """Return the report for a model on this process's device.

    Args:
        config: Megatron's configuration.
        setting: Value of ``actor.megatron.transformer_impl``.
        local_feature: Feature of the model for which Transformer Engine's layers are not used; empty if there is none.
    """
    uses_te = config.transformer_impl == "transformer_engine"
    parts = [
        f"layers: Transformer Engine {installed_version()}"
        if uses_te
        else f"layers: torch{f', because the model has {local_feature}' if local_feature else ''}",
        f"attention: {attention_kernel(config).value}",
    ]
    if config.num_moe_experts is not None:
        parts.append(f"grouped GEMM: {'yes' if config.moe_grouped_gemm else 'no'}")
    on_gpu = not config.use_cpu_initialization
    warnings = _gpu_warnings(config, setting, local_feature) if on_gpu else []
    return LayerReport(summary="; ".join(parts), warnings=warnings)


def _gpu_warnings(config: TransformerConfig, setting: TransformerImpl, local_feature: str) -> list[str]:
    warnings = []
    if config.transformer_impl == "transformer_engine":
        if untested := version_warning():
            warnings.append(untested)
    elif setting == "auto" and not local_feature:
        warnings.append(
            "Transformer Engine is not installed, so the actor trains with torch's own layers, which are slower on a "
            f"GPU; install it ({INSTALL}), or set {KEY}=local if this is intended"
        )
    if config.num_moe_experts is not None and not config.moe_grouped_gemm:
        with_te = f"install Transformer Engine ({INSTALL}) and set {KEY}=auto"
        remedy = (
            "actor_rollout_ref.actor.strategy=fsdp has grouped products for this model" if local_feature else with_te
        )
        warnings.append(
            f"mixture of experts without grouped GEMM: each layer computes its {config.num_moe_experts} experts one "
            f"after the other and waits for the GPU in between, which can make the actor several times slower; {remedy}"
        )
    return warnings
