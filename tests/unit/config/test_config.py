"""The front door: what is accepted, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_gkd.config import config_dir, load_config
from recipe_gkd.config.load import compose_config, known_keys
from recipe_gkd.config.teachers import addresses, names
from recipe_gkd.errors import ConfigError

NAME = "on_policy_distill_trainer"
NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=student"]
MEGATRON = "actor_rollout_ref.actor.megatron"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(NAME, [*NEEDED, *overrides])
    return str(caught.value)


def test_the_yaml_files_and_the_schema_have_the_same_keys() -> None:
    def leaves(section: object, prefix: str = "") -> set[str]:
        found = set()
        for name, value in section.items():  # type: ignore[attr-defined]
            inner = isinstance(value, dict) and value and prefix + str(name) not in known_keys()
            found |= leaves(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
        return found

    composed = OmegaConf.to_container(compose_config(NAME), resolve=False)
    assert leaves(composed) == set(known_keys())


@pytest.mark.parametrize("path", sorted(config_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_the_folder_loads(path: Path) -> None:
    load_config(path.stem, NEEDED)


def test_one_file_stands_for_a_list_of_one() -> None:
    assert load_config(NAME, NEEDED).data.train_files == ["train.parquet"]


def test_keys_that_must_be_set_are_named() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path=[\s\S]*data\.train_files="):
        load_config(NAME)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("data.train_file=x", "data.train_files"),
        ("trainer.sheduler=sync", "trainer.scheduler"),
        ("rollout.temperature=1", "actor_rollout_ref.rollout.temperature"),
        ("+trainer.n_gpu_per_node=1", "trainer.n_gpus_per_node"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override: str, nearest: str) -> None:
    assert f"did you mean {nearest}?" in refusal(override)


def test_an_unknown_key_in_a_file_of_ones_own_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        OmegaConf.to_yaml(
            OmegaConf.merge(OmegaConf.to_container(compose_config(NAME, NEEDED)), {"trainer": {"schedule": "sync"}})
        )
    )
    with pytest.raises(ConfigError, match=r"trainer\.schedule: did you mean trainer\.scheduler\?"):
        load_config("mine", folder=tmp_path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.nnodes=two", "trainer.nnodes: got 'two'"),
        ("trainer.scheduler=fast", "'sync', 'one_step_off', 'two_step_off' or 'n_step_off'"),
        ("actor_rollout_ref.actor.optim.lr=-1", "greater than 0"),
        ("trainer.logger=[console,wandb]", "trainer.logger.1: got 'wandb'"),
        ("actor_rollout_ref.hybrid_engine=true", "set it to false"),
        (f"{MEGATRON}.param_offload=true", "offloading is not implemented"),
        (f"{MEGATRON}.context_parallel_size=2", "context parallel is not supported"),
        (
            f"{MEGATRON}.tensor_model_parallel_size=2",
            "= 1 slots, which tensor x pipeline parallel = 2 x 1 = 2 does not",
        ),
        (
            f"{MEGATRON}.expert_model_parallel_size=2",
            "1 slots, which expert tensor x expert x pipeline parallel = 1 x 2 x 1 = 2 does not divide",
        ),
        (f"{MEGATRON}.sequence_parallel=true", "needs actor_rollout_ref.actor.megatron.tensor_model_parallel_size > 1"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "does not divide rollout.n_gpus_per_node=1"),
        ("actor_rollout_ref.rollout.max_model_len=8", "raise it, or set it to null"),
        ("trainer.resume_mode=resume_path", "resume_path needs a folder"),
        ("trainer.scheduler=n_step_off", "n_step_off needs a bound"),
        ("trainer.test_freq=5", "without validation data"),
        ("trainer.val_before_train=true", "and there is none; set custom_reward_function.path"),
        (
            "actor_rollout_ref.rollout.timeout_s=.inf",
            "actor_rollout_ref.rollout.timeout_s: got '.inf'; input should be a valid",
        ),
        ("actor_rollout_ref.rollout.val_kwargs.n=2", "greedy answers to the same prompt are all the same"),
        ("trainer.best_metric=val/x/y", "needs validation in the loop"),
        ("gkd.distill_loss_coef=0", "the gradient is zero"),
        ("gkd.use_rl_loss=true", "needs a reward; set custom_reward_function.path"),
        ("gkd.use_rl_loss=true", "compares the responses to the same prompt, but actor_rollout_ref.rollout.n=1"),
        ("gkd.beta=1", "gkd.beta: got 1"),
        ("no_equals_sign", "not of the form key=value"),
    ],
)
def test_a_bad_value_or_combination_says_what_to_change(override: str, says: str) -> None:
    assert says in refusal(override)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (["gkd.distill_temperature=2"], "do not estimate the divergence at another temperature"),
        (["gkd.sft_share=0.5", "gkd.sft_target=teacher"], "their tokens do not estimate its divergence"),
        (["actor_rollout_ref.rollout.temperature=0.7"], "its gradient is correct for responses sampled from the student"),
        (["actor_rollout_ref.rollout.top_p=0.9"], "its gradient is correct for responses sampled from the student"),
    ],
)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_from_sampled_tokens_need_tokens_sampled_from_the_student(
    kind: str, others: list[str], says: str
) -> None:
    assert says in refusal(f"gkd.distill_loss_type={kind}", *others)
    load_config(NAME, [*NEEDED, "gkd.distill_loss_type=forward_kl", *others])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["gkd.sft_share=1", "gkd.sft_loss_coef=0"], "the reference responses have no loss"),
        (["gkd.sft_share=1", "gkd.sft_target=teacher", "gkd.distill_loss_coef=0"], "the gradient is zero"),
        (["gkd.sft_share=0.5", "gkd.sft_target=teacher", "gkd.distill_loss_coef=0"], "the reference responses have no loss"),
        (["gkd.sft_share=0.5", "gkd.sft_loss_coef=0"], "the reference responses have no loss"),
        (["gkd.sft_share=1", "gkd.use_rl_loss=true"], "needs sampled responses"),
        (["gkd.use_rl_loss=true", "gkd.rl_loss_coef=0"], "has no effect; raise the coefficient"),
        (["gkd.baseline=group"], "has no effect on gkd.distill_loss_type=forward_kl"),
    ],
)
def test_answers_that_nothing_is_learnt_from_are_refused(overrides: list[str], says: str) -> None:
    assert says in refusal(*overrides)


TEACHER = "actor_rollout_ref.teacher"


@pytest.mark.parametrize(
    "entries",
    [
        [f"{TEACHER}.teachers.math=10.0.0.1:15555", f"{TEACHER}.teachers.code-7b=code.host:1"],
        [f"+{TEACHER}.teachers.math=10.0.0.1:15555", f"++{TEACHER}.teachers.code-7b=code.host:1"],
        [f'{TEACHER}.teachers={{math: "10.0.0.1:15555", code-7b: "code.host:1"}}'],
    ],
)
def test_teachers_are_named_on_the_command_line_and_keep_their_order(entries: list[str]) -> None:
    config = load_config(NAME, [*NEEDED, *entries, f"{TEACHER}.route_key=source"])
    teacher = config.actor_rollout_ref.teacher
    assert addresses(teacher) == {"math": ("10.0.0.1", 15555), "code-7b": ("code.host", 1)}
    assert names(teacher) == ("math", "code-7b")


def test_without_names_there_is_one_teacher_called_default() -> None:
    teacher = load_config(NAME, [*NEEDED, f"{TEACHER}.server_ip=10.0.0.1"]).actor_rollout_ref.teacher
    assert addresses(teacher) == {"default": ("10.0.0.1", 15555)} and names(teacher) == ("default",)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["teachers.a=x:1", "teachers.b=x:2"], "teachers has a, b, and nothing says which prompt is for which; set"),
        (["route_key=source"], "route_key=source without actor_rollout_ref.teacher.teachers"),
        (["teachers.a=x"], "teachers.a=x: expected host:port"),
        (["teachers.a=x:0"], "teachers.a=x:0: expected host:port"),
        (["teachers.a=x:65536"], "teachers.a=x:65536: expected host:port"),
        (["teachers={a/b: x:1}"], "a teacher is called 'a/b'; names become parts of metrics' names"),
        (["top_k=0"], "teacher.top_k: got 0"),
        (["wire_dtype=bfloat16"], "teacher.wire_dtype: got 'bfloat16'"),
        (["on_failure=ignore"], "'fail', 'wait' or 'skip_samples'"),
        (["max_wait_s=0"], "teacher.max_wait_s: got 0"),
        (["max_skipped_samples=-1"], "teacher.max_skipped_samples: got -1"),
    ],
)
def test_teachers_that_cannot_be_asked_are_refused(overrides: list[str], says: str) -> None:
    assert says in refusal(*(f"{TEACHER}.{override}" for override in overrides))


def test_a_baseline_of_the_group_needs_a_group() -> None:
    assert "compares the responses to the same prompt" in refusal("gkd.distill_loss_type=k1", "gkd.baseline=group")


@pytest.mark.parametrize("zero", [["sync", "null"], ["n_step_off", "0"]])
def test_updates_in_flight_need_a_schedule_that_has_something_in_flight(zero: list[str]) -> None:
    overrides = f"trainer.scheduler={zero[0]}", f"trainer.max_staleness={zero[1]}", "trainer.inflight_update=true"
    assert "nothing is under way when the weights change" in refusal(*overrides)


def test_all_bad_values_are_told_at_once() -> None:
    message = refusal("trainer.nnodes=0", "data.max_prompt_length=none", "rollout.nnodes=x")
    assert all(key in message for key in ("trainer.nnodes", "data.max_prompt_length", "rollout.nnodes"))


def test_a_missing_config_file_lists_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=NAME):
        load_config("nothing_like_it")


def test_fields_of_megatron_pass_through_without_a_plus_sign() -> None:
    config = load_config(NAME, [*NEEDED, f"{MEGATRON}.override_transformer_config.recompute_granularity=full"])
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config == {"recompute_granularity": "full"}


def test_a_config_of_ones_own_can_build_on_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [{NAME}, _self_]\ndata: {{train_files: a}}\nactor_rollout_ref: {{model: {{path: b}}}}\n"
    )
    assert load_config("mine", folder=tmp_path).data.train_files == ["a"]


def test_the_reference_in_the_docs_is_that_of_the_code() -> None:
    from recipe_gkd.config.__main__ import reference

    written = (config_dir().parent / "docs" / "config.md").read_text()
    assert written.endswith(reference() + "\n"), "make it anew: python -m recipe_gkd.config"
