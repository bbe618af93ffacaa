"""Loading, conversion and validation of configurations, and the messages of rejected ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_gkd.config import config_dir, load_config
from recipe_gkd.config.load import compose_config, known_keys
from recipe_gkd.config.teachers import addresses, names
from recipe_gkd.errors import ConfigError
from tests._support.base_config import CONFIG_NAME, REQUIRED, base_config
from tests._support.composition import compose_from_cache, compose_with_hydra

MEGATRON = "actor_rollout_ref.actor.megatron"
FSDP, STRATEGY = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.strategy"
ROLLOUT = "actor_rollout_ref.rollout"
TEACHER = "actor_rollout_ref.teacher"


def rejection(*overrides: str) -> str:
    """Return the message with which a configuration is rejected."""
    with pytest.raises(ConfigError) as caught:
        base_config(*overrides)
    return str(caught.value)


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
        with pytest.raises(ConfigError, match=CONFIG_NAME):
            load_config("nothing_like_it")

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
        with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path=[\s\S]*data\.train_files="):
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
        assert f"did you mean {nearest}?" in rejection(override)

    def test_unknown_key_in_user_config_is_rejected(self, tmp_path: Path) -> None:
        composed = OmegaConf.to_container(compose_config(CONFIG_NAME, REQUIRED))
        (tmp_path / "mine.yaml").write_text(
            OmegaConf.to_yaml(OmegaConf.merge(composed, {"trainer": {"schedule": "sync"}}))
        )
        with pytest.raises(ConfigError, match=r"trainer\.schedule: did you mean trainer\.scheduler\?"):
            load_config("mine", folder=tmp_path)

    def test_all_bad_values_are_in_one_message(self) -> None:
        message = rejection("trainer.nnodes=0", "data.max_prompt_length=none", "rollout.nnodes=x")
        assert all(key in message for key in ("trainer.nnodes", "data.max_prompt_length", "rollout.nnodes"))

    def test_megatron_fields_need_no_plus_sign(self) -> None:
        config = base_config(f"{MEGATRON}.override_transformer_config.recompute_granularity=full")
        assert config.actor_rollout_ref.actor.megatron.override_transformer_config == {"recompute_granularity": "full"}


class TestValidation:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("trainer.nnodes=two", "trainer.nnodes: got 'two'"),
            ("trainer.scheduler=fast", "'sync', 'one_step_off', 'two_step_off' or 'n_step_off'"),
            ("actor_rollout_ref.actor.optim.lr=-1", "greater than 0"),
            ("trainer.logger=[console,xy]", "trainer.logger.1: got 'xy'; expected one of console, jsonl, tensor"),
            (
                f"{MEGATRON}.context_parallel_size=2",
                "= 1 slots, which is not a multiple of tensor x context x pipeline parallel size = 1 x 2 x 1 = 2;",
            ),
            (
                f"{MEGATRON}.tensor_model_parallel_size=2",
                "= 1 slots, which is not a multiple of tensor x context x pipeline parallel size = 2 x 1 x 1 = 2;",
            ),
            (
                f"{MEGATRON}.expert_model_parallel_size=2",
                "1 slots, which is not a multiple of expert tensor x expert x pipeline parallel size = 1 x 2 x 1 = 2;",
            ),
            (f"{ROLLOUT}.tensor_model_parallel_size=2", "does not divide rollout.n_gpus_per_node=1"),
            (f"{ROLLOUT}.max_model_len=8", "raise it, or set it to null"),
            (f"{MEGATRON}.override_transformer_config.attention_dropout=0.1", "have no such noise; remove it"),
            (f"{MEGATRON}.override_transformer_config.hidden_dropout=0.1", "have no such noise; remove it"),
            (f"{MEGATRON}.override_transformer_config.num_layers=2", "is not allowed, because the actor and the roll"),
            ("trainer.resume_mode=resume_path", "resume_path needs a folder"),
            ("trainer.scheduler=n_step_off", "n_step_off needs a bound"),
            ("trainer.test_freq=5", "without validation data"),
            (
                "trainer={val_before_train: true, val_kl: false}",
                "trainer.val_kl=false; set custom_reward_function",
            ),
            (f"{ROLLOUT}.timeout_s=.inf", f"{ROLLOUT}.timeout_s: got '.inf'; input should be a valid"),
            (f"{ROLLOUT}.val_kwargs.n=2", "greedy responses to the same prompt are identical"),
            ("trainer.best_metric=val/x/y", "needs validation during training"),
            ("gkd.beta=1", "gkd.beta: got 1"),
            ("no_equals_sign", "not of the form key=value"),
        ],
    )
    def test_message_names_value_and_remedy(self, override: str, message: str) -> None:
        assert message in rejection(override)

    @pytest.mark.parametrize(
        ("override", "remedy"),
        [
            ("tensor_model_parallel_size=2", "set it to 1"),
            ("pipeline_model_parallel_size=2", "set it to 1"),
            ("virtual_pipeline_model_parallel_size=2", "set it to null"),
            ("context_parallel_size=2", "set it to 1"),
            ("expert_model_parallel_size=2", "set it to 1"),
            ("expert_tensor_parallel_size=2", "set it to null"),
            ("sequence_parallel=true", "set it to false"),
            ("override_transformer_config={recompute_granularity: full}", "set it to {}"),
            ("override_ddp_config={overlap_grad_reduce: false}", "set it to {}"),
            ("grad_offload=true", "set it to false"),
        ],
    )
    def test_layout_of_megatron_with_fsdp_is_rejected_once(self, override: str, remedy: str) -> None:
        name, _, value = override.partition("=")
        message = rejection(f"{STRATEGY}=fsdp", f"++{MEGATRON}.{name}={value}")
        assert f"{MEGATRON}.{name}=" in message
        assert message.endswith(f"has no effect with {STRATEGY}=fsdp; {remedy}, or set {STRATEGY}=megatron")
        assert "\n" not in message  # the checks of Megatron's layout are left out

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
        message = rejection(f"{FSDP}.{override}")
        assert f"{FSDP}.{override.partition('=')[0]}=" in message and f"has no effect with {STRATEGY}=meg" in message
        base_config(f"{STRATEGY}=fsdp", f"{FSDP}.{override}")

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["fsdp_size=0"], f"{FSDP}.fsdp_size=0: a copy of the model needs at least one rank; set it to -1"),
            (["fsdp_size=4"], f"= 2 x 3 = 6 slots, which is not a multiple of {FSDP}.fsdp_size=4; change the pool"),
            (["fsdp_size=-2"], f"{FSDP}.fsdp_size: got -2"),
        ],
    )
    def test_impossible_fsdp_section_is_rejected(self, overrides: list[str], message: str) -> None:
        pool = (f"{STRATEGY}=fsdp", "trainer.nnodes=2", "trainer.n_gpus_per_node=3")
        assert message in rejection(*pool, *(f"{FSDP}.{override}" for override in overrides))
        for size in (-1, 1, 2, 3, 6):
            base_config(*pool, f"{FSDP}.fsdp_size={size}")

    @pytest.mark.parametrize(("strategy", "dtype"), [("megatron", "bfloat16"), ("fsdp", "float32")])
    def test_dtype_of_actor_is_that_of_its_backend(self, strategy: str, dtype: str) -> None:
        config = base_config(f"{STRATEGY}={strategy}", f"{FSDP}.dtype=float32")
        assert config.actor_rollout_ref.actor.dtype == dtype

    @pytest.mark.parametrize(("scheduler", "staleness"), [("sync", "null"), ("n_step_off", "0")])
    def test_inflight_update_without_staleness_is_rejected(self, scheduler: str, staleness: str) -> None:
        schedule = f"trainer.scheduler={scheduler}", f"trainer.max_staleness={staleness}"
        assert "no response is in flight" in rejection(*schedule, "trainer.inflight_update=true")

    @pytest.mark.parametrize("pool", ["trainer", "rollout"])
    def test_shared_memory_of_one_node_is_refused_for_several(self, pool: str) -> None:
        transport = f"{ROLLOUT}.weight_transport=ipc"
        message = rejection(transport, f"{pool}.nnodes=2")
        assert f"weight_transport=ipc with {pool}.nnodes=2: it sends weights through the shared memory" in message
        base_config(transport)
        base_config(transport, "actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync", "rollout.nnodes=2")


class TestObjective:
    @pytest.mark.parametrize(
        ("override", "remedy"),
        [
            ("gkd.distill_loss_coef=0", "gkd.distill_loss_coef=0"),
            ("gkd.use_rl_loss=true", "set custom_reward_function.path"),
            ("gkd.use_rl_loss=true", "actor_rollout_ref.rollout.n=1"),
        ],
    )
    def test_loss_without_gradient_or_reward_is_rejected(self, override: str, remedy: str) -> None:
        assert remedy in rejection(override)

    @pytest.mark.parametrize(
        ("others", "remedy"),
        [
            (["gkd.distill_temperature=2"], "gkd.distill_temperature=2"),
            (["gkd.sft_share=0.5", "gkd.sft_target=teacher"], "set gkd.sft_target=data"),
            ([f"{ROLLOUT}.temperature=0.7"], "temperature=0.7"),
            ([f"{ROLLOUT}.top_p=0.9"], "top_p=0.9"),
        ],
    )
    @pytest.mark.parametrize("loss", ["k1", "k2", "k3"])
    def test_sampled_token_loss_needs_student_samples(self, loss: str, others: list[str], remedy: str) -> None:
        message = rejection(f"gkd.distill_loss_type={loss}", *others)
        assert f"gkd.distill_loss_type={loss}" in message and remedy in message
        base_config("gkd.distill_loss_type=forward_kl", *others)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["gkd.sft_share=1", "gkd.sft_loss_coef=0"], "gkd.sft_loss_coef=0"),
            (["gkd.sft_share=1", "gkd.sft_target=teacher", "gkd.distill_loss_coef=0"], "gkd.distill_loss_coef=0"),
            (["gkd.sft_share=0.5", "gkd.sft_target=teacher", "gkd.distill_loss_coef=0"], "gkd.distill_loss_coef=0"),
            (["gkd.sft_share=0.5", "gkd.sft_loss_coef=0"], "gkd.sft_loss_coef=0"),
            (["gkd.enable_teacher=false"], "the gradient is zero: gkd.enable_teacher=false"),
            (["gkd.sft_share=0.5", "gkd.sft_target=teacher", "gkd.enable_teacher=false"], "gkd.enable_teacher=false"),
            (["gkd.sft_share=1", "gkd.use_rl_loss=true"], "gkd.sft_share=1"),
            (["gkd.use_rl_loss=true", "gkd.rl_loss_coef=0"], "gkd.rl_loss_coef=0"),
            (["gkd.baseline=group"], "gkd.distill_loss_type=forward_kl"),
        ],
    )
    def test_responses_without_loss_are_rejected(self, overrides: list[str], message: str) -> None:
        assert message in rejection(*overrides)

    def test_group_baseline_with_one_response_is_rejected(self) -> None:
        message = rejection("gkd.distill_loss_type=k1", "gkd.baseline=group")
        assert "gkd.baseline=group" in message and "actor_rollout_ref.rollout.n=1" in message


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
        ("overrides", "message"),
        [
            (["teachers.a=x:1", "teachers.b=x:2"], "teachers has a, b, but no key selects a teacher for each prompt"),
            (["route_key=source"], f"route_key=source without {TEACHER}.teachers"),
            (["teachers.a=x"], "teachers.a=x: expected host:port"),
            (["teachers.a=x:0"], "teachers.a=x:0: expected host:port"),
            (["teachers.a=x:65536"], "teachers.a=x:65536: expected host:port"),
            (["teachers={a/b: x:1}"], "got a teacher with the name 'a/b'; names are part of metric names"),
            (["top_k=0"], "teacher.top_k: got 0"),
            (["wire_dtype=bfloat16"], "teacher.wire_dtype: got 'bfloat16'"),
            (["on_failure=ignore"], "'fail', 'wait' or 'skip_samples'"),
            (["max_wait_s=0"], "teacher.max_wait_s: got 0"),
            (["max_skipped_samples=-1"], "teacher.max_skipped_samples: got -1"),
        ],
    )
    def test_invalid_teacher_is_rejected(self, overrides: list[str], message: str) -> None:
        assert message in rejection(*(f"{TEACHER}.{override}" for override in overrides))


class TestLogger:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Absent", "does not define Absent"),
            ("NO_CLASS", "NO_CLASS is not a class"),
            ("NoClose", "the class NoClose has no close()"),
            ("Neither", "the class Neither has no log() and no close()"),
            ("NoRunInfo", "NoRunInfo(run_info) fails: too many positional arguments; its signature is (); define"),
        ],
    )
    def test_unusable_class_is_rejected(self, tmp_path: Path, name: str, message: str) -> None:
        file = tmp_path / "loggers.py"
        file.write_text(
            "NO_CLASS = 1\n\n\nclass Neither:\n    pass\n\n\nclass NoClose:\n    def log(self, step, metrics):\n"
            "        pass\n\n\nclass NoRunInfo(NoClose):\n    def close(self):\n        pass\n"
        )
        assert message in rejection(f"trainer.logger=[console,{file}:{name}]")

    def test_missing_file_is_rejected(self, tmp_path: Path) -> None:
        assert f"there is no file {tmp_path}/absent.py" in rejection(f"trainer.logger=[{tmp_path}/absent.py:Mine]")
