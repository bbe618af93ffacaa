"""Requirements of devices that actor, rollout engines and teacher share, and of ``trainer.oom=split``."""

from __future__ import annotations

import pytest

from recipe_gkd.config.hybrid_engine import hybrid_cuda_problems
from recipe_gkd.config.weight_transport import cuda_problems
from recipe_gkd.errors import ConfigError
from tests._support.base_config import base_config
from tests._support.errors import keys_of_parts, raises

ACTOR = "actor_rollout_ref.actor"
HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
COLLECTIVE = "actor_rollout_ref.rollout.weight_transport=collective"
SLEEPING_TEACHER = "actor_rollout_ref.teacher.sleep_between_batches=true"
SPLIT = "trainer.oom=split"


class TestHybridEngine:
    def test_other_schedules_than_sync_are_refused(self) -> None:
        for schedule in ("one_step_off", "two_step_off"):
            with raises(ConfigError, keys=("actor_rollout_ref.hybrid_engine", "trainer.scheduler")):
                base_config(HYBRID[0], f"trainer.scheduler={schedule}")
        base_config(HYBRID[0], "trainer.scheduler=n_step_off", "trainer.max_staleness=0")

    @pytest.mark.parametrize("override", [COLLECTIVE, "trainer.nnodes=2"])
    def test_cuda_needs_one_node_and_ipc(self, override: str) -> None:
        keys = ("actor_rollout_ref.hybrid_engine", override.partition("=")[0])
        [problem] = hybrid_cuda_problems(base_config(*HYBRID, override))
        assert problem.keys == keys
        with raises(ConfigError, keys=keys):
            base_config(*HYBRID, override, "trainer.device=cuda")
        assert not list(hybrid_cuda_problems(base_config(override)))

    @pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_memory_that_cuda_ipc_cannot_send_is_refused_on_one_gpu(self, name: str) -> None:
        setting = "max_split_size_mb:64, expandable_segments:True"
        [problem] = cuda_problems(base_config(*HYBRID), {name: setting})
        assert f"{name}={setting}" in str(problem) and f"unset {name}" in str(problem)
        of_workers = base_config(*HYBRID, f"ray_init.env_vars={{{name}: 'expandable_segments:True'}}")
        [problem] = cuda_problems(of_workers, {})
        assert problem.keys == ("actor_rollout_ref.hybrid_engine", f"ray_init.env_vars.{name}")
        for config in (base_config(), base_config(*HYBRID, "trainer.n_gpus_per_node=2")):
            assert not list(cuda_problems(config, {name: setting}))
        assert not list(cuda_problems(base_config(*HYBRID), {name: "expandable_segments:False"}))

    def test_rollout_pool_is_that_of_the_actor(self) -> None:
        sizes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=3")
        assert base_config(*sizes).rollout_pool == (1, 3)
        assert base_config(*sizes, *HYBRID).rollout_pool == (2, 4)

    def test_engines_must_divide_the_devices_of_the_actor(self) -> None:
        keys = ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", *HYBRID)
        base_config("trainer.n_gpus_per_node=2", *keys)
        with raises(
            ConfigError, keys=("actor_rollout_ref.rollout.tensor_model_parallel_size", "trainer.n_gpus_per_node")
        ):
            base_config("trainer.n_gpus_per_node=3", *keys)


class TestTeacherSleep:
    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            (["trainer.scheduler=one_step_off"], "trainer.scheduler"),
            (
                ["trainer.scheduler=sync", "actor_rollout_ref.teacher.backend=hf"],
                "actor_rollout_ref.teacher.backend",
            ),
        ],
    )
    def test_needs_service_and_sync(self, overrides: list[str], key: str) -> None:
        with raises(ConfigError) as caught:
            base_config(SLEEPING_TEACHER, "actor_rollout_ref.teacher.model_path=x", *overrides)
        assert (SLEEPING_TEACHER.partition("=")[0], key) in keys_of_parts(caught.value)
        base_config(SLEEPING_TEACHER, "trainer.scheduler=sync")


class TestOutOfMemory:
    @pytest.mark.parametrize(
        ("override", "name"),
        [
            ("use_dynamic_bsz=false", "use_dynamic_bsz"),
            ("megatron.tensor_model_parallel_size=2", "megatron.tensor_model_parallel_size"),
            ("megatron.context_parallel_size=2", "megatron.context_parallel_size"),
            ("strategy=fsdp", "fsdp_config.fsdp_size"),
        ],
    )
    def test_split_needs_independent_ranks(self, override: str, name: str) -> None:
        with raises(ConfigError, keys=("trainer.oom", f"{ACTOR}.{name}")):
            base_config(SPLIT, "trainer.n_gpus_per_node=2", f"{ACTOR}.{override}")

    def test_split_accepts_data_parallelism(self) -> None:
        base_config(SPLIT, "trainer.n_gpus_per_node=2")
        base_config(SPLIT, f"{ACTOR}.strategy=fsdp")
        fsdp = f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.fsdp_size=1"
        base_config(SPLIT, "trainer.n_gpus_per_node=2", *fsdp)


@pytest.mark.parametrize(
    ("strategy", "section", "keys", "states"),
    [
        ("megatron", "megatron", ["grad_offload"], {"grads"}),
        ("megatron", "megatron", ["param_offload", "optimizer_offload"], {"params", "optimizer"}),
        ("fsdp", "fsdp_config", ["param_offload"], {"params"}),
        ("fsdp", "fsdp_config", [], set()),
    ],
)
def test_offloaded_states_are_those_of_the_backend(
    strategy: str, section: str, keys: list[str], states: set[str]
) -> None:
    config = base_config(f"{ACTOR}.strategy={strategy}", *(f"{ACTOR}.{section}.{key}=true" for key in keys))
    assert config.actor_rollout_ref.actor.offloaded_states == states
