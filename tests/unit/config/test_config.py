"""Loading, conversion and validation of configurations, and the keys of rejected ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_gkd.config import config_dir, load_config
from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.key_types import known_keys
from recipe_gkd.config.teachers import addresses, names
from recipe_gkd.errors import ConfigError
from tests._support.base_config import CONFIG_NAME, REQUIRED, base_config
from tests._support.composition import compose_from_cache, compose_with_hydra
from tests._support.errors import keys_of_parts, raises

MEGATRON = "actor_rollout_ref.actor.megatron"
FSDP, STRATEGY = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.strategy"
ROLLOUT = "actor_rollout_ref.rollout"
TEACHER = "actor_rollout_ref.teacher"


POOL = ("trainer.nnodes", "trainer.n_gpus_per_node")


def rejected_keys(*overrides: str) -> list[tuple[str, ...]]:
    """Return the keys of each error with which a configuration is rejected."""
    with raises(ConfigError) as caught:
        base_config(*overrides)
    return keys_of_parts(caught.value)


def parallel_sizes(*names: str) -> tuple[str, ...]:
    """Return the keys of an error about the actor pool and sizes of Megatron's section."""
    return (*POOL, *(f"{MEGATRON}.{name}_parallel_size" for name in names))


class TestFiles:
    def test_yaml_and_schema_have_same_keys(self) -> None:
        def leaves(section: object, prefix: str = "") -> set[str]:
            found = set()
            for name, value in section.items():  # type: ignore[attr-defined]
                inner = isinstance(value, dict) and value and prefix + str(name) not in known_keys()
                found |= leaves(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
            return found

        composed = OmegaConf.to_container(compose_config(CONFIG_NAME), resolve=False)
        assert leaves(composed) == set(known_keys())

    @pytest.mark.parametrize("path", sorted(config_dir().glob("*.yaml")), ids=lambda path: path.stem)
    def test_every_config_loads(self, path: Path) -> None:
        load_config(path.stem, REQUIRED)

    def test_missing_config_lists_existing_ones(self) -> None:
        with raises(ConfigError, keys=("--config-name",)) as caught:
            load_config("nothing_like_it")
        assert CONFIG_NAME in caught.value.remedy

    def test_user_config_can_extend_package_config(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(
            f"defaults: [{CONFIG_NAME}, _self_]\ndata: {{train_files: a}}\nactor_rollout_ref: {{model: {{path: b}}}}\n"
        )
        assert load_config("mine", folder=tmp_path).data.train_files == ["a"]

    @pytest.mark.parametrize("name", ["on_policy_distill_trainer", "quickstart_simple"])
    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["trainer.save_freq=3", "data.train_files=[a, b]", "actor_rollout_ref.model.path=${trainer.project_name}"],
            [
                "++actor_rollout_ref.teacher.teachers={math: {server_ip: a, server_port: 1}}",
                "+custom_reward_function.kwargs.x=1",
            ],
            ["gkd=distillation", "trainer.save_freq=3"],
            ["++ray_init.env_vars.A=b", "gkd.custom_loss.path=null", "~trainer.save_freq"],
        ],
    )
    def test_composition_of_the_tests_equals_hydra(self, name: str, overrides: list[str]) -> None:
        found, expected = (
            compose(name, overrides, config_dir()) for compose in (compose_from_cache, compose_with_hydra)
        )
        assert OmegaConf.to_container(found) == OmegaConf.to_container(expected) and OmegaConf.is_struct(found)

    def test_docs_contain_generated_reference(self) -> None:
        from recipe_gkd.config.__main__ import reference

        written = (config_dir().parent / "docs" / "config.md").read_text()
        assert written.endswith(reference() + "\n"), "generate it again with python -m recipe_gkd.config"


class TestKeys:
    def test_single_file_becomes_list(self) -> None:
        assert base_config().data.train_files == ["train.parquet"]

    def test_missing_required_keys_are_named(self) -> None:
        with raises(ConfigError, keys=("actor_rollout_ref.model.path", "data.train_files")):
            load_config(CONFIG_NAME)

    @pytest.mark.parametrize(
        ("override", "nearest"),
        [
            ("data.train_file=x", "data.train_files"),
            ("trainer.sheduler=sync", "trainer.scheduler"),
            ("rollout.temperature=1", "actor_rollout_ref.rollout.temperature"),
            ("+trainer.n_gpu_per_node=1", "trainer.n_gpus_per_node"),
        ],
    )
    def test_unknown_key_names_nearest_key(self, override: str, nearest: str) -> None:
        with raises(ConfigError, keys=(override.partition("=")[0].lstrip("+"),), suggestions=(nearest,)):
            base_config(override)

    def test_unknown_key_in_user_config_is_rejected(self, tmp_path: Path) -> None:
        composed = OmegaConf.to_container(compose_config(CONFIG_NAME, REQUIRED))
        (tmp_path / "mine.yaml").write_text(
            OmegaConf.to_yaml(OmegaConf.merge(composed, {"trainer": {"schedule": "sync"}}))
        )
        with raises(ConfigError, keys=("trainer.schedule",), suggestions=("trainer.scheduler",)):
            load_config("mine", folder=tmp_path)

    def test_all_bad_values_are_in_one_error(self) -> None:
        found = rejected_keys("trainer.nnodes=0", "data.max_prompt_length=none", "rollout.nnodes=x")
        assert sorted(found) == [("data.max_prompt_length",), ("rollout.nnodes",), ("trainer.nnodes",)]

    def test_megatron_fields_need_no_plus_sign(self) -> None:
        config = base_config(f"{MEGATRON}.override_transformer_config.recompute_granularity=full")
        assert config.actor_rollout_ref.actor.megatron.override_transformer_config == {"recompute_granularity": "full"}


class TestValidation:
    @pytest.mark.parametrize("override", ["data=null", "rollout=null", "hydra=null", "=3"])
    def test_group_that_is_no_name_is_refused(self, override: str) -> None:
        with pytest.raises(ConfigError, match="cannot be composed with these overrides"):
            base_config(override)

    def test_chosen_checkpoint_does_not_fit_a_start_from_the_model(self) -> None:
        path = "trainer.resume_from_path=/x/global_step_4"
        assert base_config(path).trainer.resume_mode == "auto"
        assert rejected_keys("trainer.resume_mode=disable", path) == [
            ("trainer.resume_mode", "trainer.resume_from_path")
        ]

    @pytest.mark.parametrize(
        ("override", "others"),
        [
            ("trainer.nnodes=two", ()),
            ("trainer.scheduler=fast", ()),
            ("actor_rollout_ref.actor.optim.lr=-1", ()),
            ("trainer.logger=[console,xy]", ()),
            (f"{ROLLOUT}.tensor_model_parallel_size=2", ("rollout.n_gpus_per_node",)),
            (f"{ROLLOUT}.max_model_len=8", ("data.max_prompt_length", "data.max_response_length")),
            (f"{MEGATRON}.override_transformer_config.attention_dropout=0.1", ()),
            (f"{MEGATRON}.override_transformer_config.hidden_dropout=0.1", ()),
            (f"{MEGATRON}.override_transformer_config.num_layers=2", ()),
            (f"{MEGATRON}.override_transformer_config.moe_expert_capacity_factor=2.0", ()),
            (f"{MEGATRON}.override_transformer_config.moe_router_topk_limited_devices=1", ()),
            (f"{MEGATRON}.override_transformer_config.moe_apply_probs_on_input=true", ()),
            (f"{MEGATRON}.override_transformer_config.cuda_graph_impl=local", ()),
            (f"{MEGATRON}.override_transformer_config.enable_cuda_graph=true", ()),
            (f"{MEGATRON}.override_transformer_config.num_microbatches_with_partial_activation_checkpoints=1", ()),
            (f"{MEGATRON}.override_transformer_config.moe_router_load_balancing_type=sinkhorn", ()),
            (f"{MEGATRON}.override_transformer_config.moe_router_load_balancing_type=[aux_loss,sinkhorn]", ()),
            ("trainer.resume_mode=resume_path", ("trainer.resume_from_path",)),
            ("trainer.scheduler=n_step_off", ("trainer.max_staleness",)),
            ("trainer.save_freq=nan", ()),
            ("trainer.default_local_dir=", ()),
            ("trainer.trace_file=", ()),
            ("trainer.experiment_name=''", ()),
            ("trainer.project_name=${trainer.nope}", ()),
            ("trainer.default_local_dir=${oc.env:NO_SUCH_VARIABLE}", ()),
            ("trainer.test_freq=5", ("trainer.val_before_train", "data.val_files")),
            (f"{ROLLOUT}.timeout_s=.inf", ()),
            (f"{ROLLOUT}.val_kwargs.n=2", (f"{ROLLOUT}.val_kwargs.temperature",)),
            ("trainer.best_metric=val/x/y", ("trainer.test_freq",)),
            ("gkd.beta=1", ()),
            ("no_equals_sign", ()),
        ],
    )
    def test_rejected_value_is_named_with_the_keys_in_conflict(self, override: str, others: tuple[str, ...]) -> None:
        assert rejected_keys(override) == [(override.partition("=")[0], *others)]

    @pytest.mark.parametrize(
        ("size", "groups"),
        [
            ("context", [("tensor_model", "context", "pipeline_model")]),
            (
                "tensor_model",
                [("tensor_model", "context", "pipeline_model"), ("expert_tensor", "expert_model", "pipeline_model")],
            ),
            ("expert_model", [("expert_tensor", "expert_model", "pipeline_model")]),
        ],
    )
    def test_parallel_size_that_does_not_divide_the_pool_is_rejected(
        self, size: str, groups: list[tuple[str, ...]]
    ) -> None:
        found = rejected_keys(f"{MEGATRON}.{size}_parallel_size=2")
        assert found == [parallel_sizes(*group) for group in groups]

    def test_float32_residual_stream_needs_stages_that_exchange_float32(self) -> None:
        name = f"{MEGATRON}.override_transformer_config.fp32_residual_connection"
        stages = (f"{MEGATRON}.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2")
        keys = (name, f"{MEGATRON}.pipeline_model_parallel_size", f"{MEGATRON}.dtype")
        assert rejected_keys(*stages, f"{name}=true") == [keys]
        base_config(f"{name}=true")
        base_config(*stages, f"{name}=true", f"{MEGATRON}.dtype=float32")

    def test_validation_without_reward_and_teacher_is_rejected(self) -> None:
        found = rejected_keys("trainer={val_before_train: true, val_kl: false}")
        assert ("custom_reward_function.path", "trainer.val_kl") in found

    @pytest.mark.parametrize(
        "override",
        [
            "tensor_model_parallel_size=2",
            "pipeline_model_parallel_size=2",
            "virtual_pipeline_model_parallel_size=2",
            "context_parallel_size=2",
            "expert_model_parallel_size=2",
            "expert_tensor_parallel_size=2",
            "sequence_parallel=true",
            "override_transformer_config={recompute_granularity: full}",
            "override_ddp_config={overlap_grad_reduce: false}",
            "grad_offload=true",
        ],
    )
    def test_layout_of_megatron_with_fsdp_is_rejected_once(self, override: str) -> None:
        name = override.partition("=")[0]
        found = rejected_keys(f"{STRATEGY}=fsdp", f"++{MEGATRON}.{override}")
        assert found == [(f"{MEGATRON}.{name}", STRATEGY)]  # the checks of Megatron's layout are left out

    @pytest.mark.parametrize(
        "override",
        [
            "fsdp_size=1",
            "wrap_policy=[Layer]",
            "gradient_checkpointing=true",
            "reshard_after_forward=false",
            "param_offload=true",
        ],
    )
    def test_layout_of_fsdp_with_megatron_is_rejected(self, override: str) -> None:
        assert rejected_keys(f"{FSDP}.{override}") == [(f"{FSDP}.{override.partition('=')[0]}", STRATEGY)]
        base_config(f"{STRATEGY}=fsdp", f"{FSDP}.{override}")

    @pytest.mark.parametrize(
        ("size", "others"),
        [(0, ()), (4, POOL), (-2, ())],
    )
    def test_impossible_fsdp_section_is_rejected(self, size: int, others: tuple[str, ...]) -> None:
        pool = (f"{STRATEGY}=fsdp", "trainer.nnodes=2", "trainer.n_gpus_per_node=3")
        assert rejected_keys(*pool, f"{FSDP}.fsdp_size={size}") == [(*others, f"{FSDP}.fsdp_size")]
        for size in (-1, 1, 2, 3, 6):
            base_config(*pool, f"{FSDP}.fsdp_size={size}")

    @pytest.mark.parametrize(("strategy", "dtype"), [("megatron", "auto"), ("fsdp", "float32")])
    def test_dtype_of_actor_is_that_of_its_backend(self, strategy: str, dtype: str) -> None:
        config = base_config(f"{STRATEGY}={strategy}", f"{FSDP}.dtype=float32")
        assert config.actor_rollout_ref.actor.dtype == dtype

    @pytest.mark.parametrize(("scheduler", "staleness"), [("sync", "null"), ("n_step_off", "0")])
    def test_inflight_update_without_staleness_is_rejected(self, scheduler: str, staleness: str) -> None:
        schedule = f"trainer.scheduler={scheduler}", f"trainer.max_staleness={staleness}"
        [keys] = rejected_keys(*schedule, "trainer.inflight_update=true")
        assert keys == ("trainer.inflight_update", "trainer.scheduler", "trainer.max_staleness")

    @pytest.mark.parametrize("pool", ["trainer", "rollout"])
    def test_shared_memory_of_one_node_is_refused_for_several(self, pool: str) -> None:
        transport = f"{ROLLOUT}.weight_transport=ipc"
        assert rejected_keys(transport, f"{pool}.nnodes=2") == [(f"{ROLLOUT}.weight_transport", f"{pool}.nnodes")]
        base_config(transport)
        base_config(transport, "actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync", "rollout.nnodes=2")


class TestObjective:
    @pytest.mark.parametrize(
        ("override", "keys"),
        [
            ("gkd.distill_loss_coef=0", ("gkd.distill_loss_coef", "gkd.use_rl_loss", "gkd.sft_share")),
            ("gkd.use_rl_loss=true", ("gkd.use_rl_loss", "custom_reward_function.path")),
            ("gkd.use_rl_loss=true", ("gkd.use_rl_loss", f"{ROLLOUT}.n")),
        ],
    )
    def test_loss_without_gradient_or_reward_is_rejected(self, override: str, keys: tuple[str, ...]) -> None:
        assert keys in rejected_keys(override)

    @pytest.mark.parametrize(
        ("others", "keys"),
        [
            (["gkd.distill_temperature=2"], ["gkd.distill_temperature"]),
            (["gkd.sft_share=0.5", "gkd.sft_target=teacher"], ["gkd.sft_target"]),
            (["gkd.warmup_steps=5", "gkd.sft_target=teacher"], ["gkd.sft_target"]),
            ([f"{ROLLOUT}.temperature=0.7"], [f"{ROLLOUT}.{name}" for name in ("temperature", "top_p", "top_k")]),
            ([f"{ROLLOUT}.top_p=0.9"], [f"{ROLLOUT}.{name}" for name in ("temperature", "top_p", "top_k")]),
        ],
    )
    @pytest.mark.parametrize("loss", ["k1", "k2", "k3"])
    def test_sampled_token_loss_needs_student_samples(self, loss: str, others: list[str], keys: list[str]) -> None:
        assert rejected_keys(f"gkd.distill_loss_type={loss}", *others) == [("gkd.distill_loss_type", *keys)]
        base_config("gkd.distill_loss_type=forward_kl", *others)

    @pytest.mark.parametrize(
        ("overrides", "names"),
        [
            (["sft_share=1", "sft_loss_coef=0"], ("sft_share", "sft_loss_coef")),
            (
                ["sft_share=1", "sft_target=teacher", "distill_loss_coef=0"],
                ("sft_share", "sft_target", "distill_loss_coef"),
            ),
            (
                ["sft_share=0.5", "sft_target=teacher", "distill_loss_coef=0"],
                ("sft_share", "sft_target", "distill_loss_coef"),
            ),
            (["sft_share=0.5", "sft_loss_coef=0"], ("sft_share", "sft_loss_coef")),
            (["warmup_steps=5", "sft_loss_coef=0"], ("warmup_steps", "sft_loss_coef")),
            (
                ["warmup_steps=5", "sft_target=teacher", "enable_teacher=false"],
                ("warmup_steps", "sft_target", "enable_teacher"),
            ),
            (["warmup_steps=5", "distill_loss_coef=0"], ("distill_loss_coef", "use_rl_loss", "sft_share")),
            (["enable_teacher=false"], ("enable_teacher", "use_rl_loss", "sft_share")),
            (
                ["sft_share=0.5", "sft_target=teacher", "enable_teacher=false"],
                ("sft_share", "sft_target", "enable_teacher"),
            ),
            (["sft_share=1", "use_rl_loss=true"], ("use_rl_loss", "sft_share")),
            (["use_rl_loss=true", "rl_loss_coef=0"], ("use_rl_loss", "rl_loss_coef")),
            (["baseline=group"], ("baseline", "distill_loss_type")),
        ],
    )
    def test_responses_without_loss_are_rejected(self, overrides: list[str], names: tuple[str, ...]) -> None:
        found = rejected_keys(*(f"gkd.{override}" for override in overrides))
        assert tuple(f"gkd.{name}" for name in names) in found

    def test_recording_of_several_teachers_is_rejected(self) -> None:
        teachers = [f"+{TEACHER}.teachers.{name}=h:1" for name in "ab"]
        path, references = f"{TEACHER}.path=recording", ("gkd.warmup_steps=5", "gkd.sft_target=teacher")
        assert (f"{TEACHER}.path", f"{TEACHER}.teachers") in rejected_keys(*teachers, path, *references)
        base_config(path, *references)

    def test_group_baseline_with_one_response_is_rejected(self) -> None:
        assert rejected_keys("gkd.distill_loss_type=k1", "gkd.baseline=group") == [("gkd.baseline", f"{ROLLOUT}.n")]


class TestTeachers:
    @pytest.mark.parametrize(
        "entries",
        [
            [f"{TEACHER}.teachers.math=10.0.0.1:15555", f"{TEACHER}.teachers.code-7b=code.host:1"],
            [f"+{TEACHER}.teachers.math=10.0.0.1:15555", f"++{TEACHER}.teachers.code-7b=code.host:1"],
            [f'{TEACHER}.teachers={{math: "10.0.0.1:15555", code-7b: "code.host:1"}}'],
        ],
    )
    def test_named_teachers_keep_their_order(self, entries: list[str]) -> None:
        teacher = base_config(*entries, f"{TEACHER}.route_key=source").actor_rollout_ref.teacher
        assert addresses(teacher) == {"math": ("10.0.0.1", 15555), "code-7b": ("code.host", 1)}
        assert names(teacher) == ("math", "code-7b")

    def test_single_teacher_is_default(self) -> None:
        teacher = base_config(f"{TEACHER}.server_ip=10.0.0.1").actor_rollout_ref.teacher
        assert addresses(teacher) == {"default": ("10.0.0.1", 15555)} and names(teacher) == ("default",)

    @pytest.mark.parametrize(
        ("overrides", "names"),
        [
            (["teachers.a=x:1", "teachers.b=x:2"], ["teachers", "route_key"]),
            (["route_key=source"], ["route_key", "teachers"]),
            (["teachers.a=x"], ["teachers.a.address"]),
            (["teachers.a=x:0"], ["teachers.a.address"]),
            (["teachers.a=x:65536"], ["teachers.a.address"]),
            (["teachers={a/b: x:1}"], ["teachers.a/b"]),
            (["top_k=0"], ["top_k"]),
            (["wire_dtype=bfloat16"], ["wire_dtype"]),
            (["on_failure=ignore"], ["on_failure"]),
            (["max_wait_s=0"], ["max_wait_s"]),
            (["max_skipped_samples=-1"], ["max_skipped_samples"]),
        ],
    )
    def test_invalid_teacher_is_rejected(self, overrides: list[str], names: list[str]) -> None:
        found = rejected_keys(*(f"{TEACHER}.{override}" for override in overrides))
        assert found == [tuple(f"{TEACHER}.{name}" for name in names)]


class TestLogger:
    @pytest.mark.parametrize("name", ["Absent", "NO_CLASS", "NoClose", "Neither", "NoRunInfo"])
    def test_unusable_class_is_rejected(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / "loggers.py"
        file.write_text(
            "NO_CLASS = 1\n\n\nclass Neither:\n    pass\n\n\nclass NoClose:\n    def log(self, step, metrics):\n"
            "        pass\n\n\nclass NoRunInfo(NoClose):\n    def close(self):\n        pass\n\n\n"
            "class Usable(NoRunInfo):\n    def __init__(self, run_info):\n        pass\n"
        )
        base_config(f"trainer.logger=[console,{file}:Usable]")
        assert rejected_keys(f"trainer.logger=[console,{file}:{name}]") == [("trainer.logger",)]

    def test_missing_file_is_rejected(self, tmp_path: Path) -> None:
        assert rejected_keys(f"trainer.logger=[{tmp_path}/absent.py:Mine]") == [("trainer.logger",)]
