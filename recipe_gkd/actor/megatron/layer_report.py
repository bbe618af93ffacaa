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


def layer_report(config: TransformerConfig, setting: TransformerImpl) -> LayerReport:
    """Return the report for a model on this process's device.

    Args:
        config: Megatron's configuration.
        setting: Value of ``actor.megatron.transformer_impl``.
    """
    uses_te = config.transformer_impl == "transformer_engine"
    parts = [
        f"layers: Transformer Engine {installed_version()}" if uses_te else "layers: torch",
        f"attention: {attention_kernel(config).value}",
    ]
    if config.num_moe_experts is not None:
        parts.append(f"grouped GEMM: {'yes' if config.moe_grouped_gemm else 'no'}")
    on_gpu = not config.use_cpu_initialization
    return LayerReport(summary="; ".join(parts), warnings=_gpu_warnings(config, setting) if on_gpu else [])


def _gpu_warnings(config: TransformerConfig, setting: TransformerImpl) -> list[str]:
    warnings = []
    if config.transformer_impl == "transformer_engine":
        if untested := version_warning():
            warnings.append(untested)
    elif setting == "auto":
        warnings.append(
            "Transformer Engine is not installed, so the actor trains with torch's own layers, which are slower on a "
            f"GPU; install it ({INSTALL}), or set {KEY}=local if this is intended"
        )
    if config.num_moe_experts is not None and not config.moe_grouped_gemm:
        warnings.append(
            f"mixture of experts without grouped GEMM: each layer computes its {config.num_moe_experts} experts one "
            "after the other and waits for the GPU in between, which can make the actor several times slower; install "
            f"Transformer Engine ({INSTALL}) and set {KEY}=auto"
        )
    return warnings
