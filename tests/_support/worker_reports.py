"""Reports of workers after their start."""

from __future__ import annotations

from recipe_gkd.actor.ranks import RankReport
from recipe_gkd.ray_cluster.placement import DeviceReport
from recipe_gkd.rollout.engine_report import EngineReport

GIB = 1 << 30


def worker_report(
    gpus: list[str], *, node: str = "a", assigned: list[str] | None = None, visible: list[str] | None = None
) -> DeviceReport:
    """Return the report of a worker that sees the GPUs ``GPU-<n>``. By default, Ray assigned exactly these to it."""
    return DeviceReport(
        node=node,
        node_id=node * 40,
        node_ip="10.0.0.1",
        devices=[f"GPU-{gpu}" for gpu in gpus],
        device=", ".join(f"H200 GPU-{gpu}" for gpu in gpus) or "cpu",
        device_memory=len(gpus) * 141 * GIB,
        host_memory=512 * GIB,
        assigned=gpus if assigned is None else assigned,
        visible=gpus if visible is None else visible,
    )


def rank_report(dp_rank: int = 0, pp_rank: int = 0, summary: str = "", warnings: tuple[str, ...] = ()) -> RankReport:
    """Return the report of an actor rank on a CPU."""
    return RankReport(
        rank=0,
        dp_rank=dp_rank,
        dp_size=1,
        tp_rank=0,
        pp_rank=pp_rank,
        n_parameters=1,
        device_name="cpu",
        seconds=0.0,
        summary=summary,
        warnings=warnings,
    )


def engine_report() -> EngineReport:
    """Return the report of a rollout engine in float32."""
    return EngineReport(
        vllm="0",
        dtype="float32",
        head_dtype="float32",
        max_model_len=80,
        max_num_batched_tokens=80,
        kv_cache_tokens=800,
    )
