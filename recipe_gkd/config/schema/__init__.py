"""Schema of the configuration: type, range and description of every key.

The schema contains no defaults. All values are in the YAML files under ``config/``. ``compose.py`` composes them,
``load.py`` converts them, and ``validate.py`` rejects combinations that cannot work. ``python -m recipe_gkd.config``
prints the descriptions as a table.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from recipe_gkd.config.schema.actor import (
    ActorConfig,
    CheckpointConfig,
    FsdpConfig,
    LoraConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
)
from recipe_gkd.config.schema.data import DataConfig
from recipe_gkd.config.schema.fields import STRICT, key, timeout
from recipe_gkd.config.schema.gkd import AggregationMode, CustomLossConfig, GkdConfig
from recipe_gkd.config.schema.reward import RewardFunctionConfig
from recipe_gkd.config.schema.rollout import RolloutEngineConfig, RolloutPoolConfig, ValidationSamplingConfig
from recipe_gkd.config.schema.teacher import TeacherConfig
from recipe_gkd.config.schema.trainer import (
    BUILT_IN_LOGGERS,
    TRACKING_SERVICES,
    ProfileConfig,
    RayInitConfig,
    Scheduler,
    TrainerConfig,
)

__all__ = [
    "BUILT_IN_LOGGERS",
    "TRACKING_SERVICES",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AggregationMode",
    "CheckpointConfig",
    "Config",
    "CustomLossConfig",
    "DataConfig",
    "FsdpConfig",
    "GkdConfig",
    "LoraConfig",
    "MegatronConfig",
    "ModelConfig",
    "OptimConfig",
    "ProfileConfig",
    "RayInitConfig",
    "RewardFunctionConfig",
    "RolloutEngineConfig",
    "RolloutPoolConfig",
    "Scheduler",
    "TeacherConfig",
    "TrainerConfig",
    "ValidationSamplingConfig",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorRolloutRefConfig:
    """Student, rollout and teacher, section ``actor_rollout_ref``."""

    hybrid_engine: bool = key(
        "Place the rollout engines on the devices of the actor pool and let both take turns: engines sleep while the "
        "actor trains. `rollout.nnodes` and `rollout.n_gpus_per_node` have no effect then. Needs "
        "`trainer.scheduler=sync`. The `*_offload` keys of the actor determine what leaves the devices for the "
        "engines, and `actor_rollout_ref.rollout.sleep_level` what leaves them for the actor."
    )
    nccl_timeout: float = timeout(
        "each phase of a weight sync (connect, begin, transfer, commit), and each sleep, wake-up and verification "
        "of the rollout engines (`hybrid_engine`), in seconds. Collectives of the actor get 60 s more. On CUDA "
        "they get at least 60 s more than `actor.timeout_s` and `trainer.startup_timeout_s`, so that a hang is "
        "diagnosed before NCCL ends the processes."
    )
    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutEngineConfig
    teacher: TeacherConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """Complete configuration of a run, converted and validated."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    rollout: RolloutPoolConfig
    gkd: GkdConfig
    custom_reward_function: RewardFunctionConfig
    trainer: TrainerConfig
    ray_init: RayInitConfig

    @property
    def rollout_pool(self) -> tuple[int, int]:
        """Number of nodes of the rollout workers, and of their devices on each node."""
        pool = self.trainer if self.actor_rollout_ref.hybrid_engine else self.rollout
        return pool.nnodes, pool.n_gpus_per_node
