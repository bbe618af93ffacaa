"""Warnings about keys that the user set and that nothing reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd import main_gkd
from recipe_gkd.config.compose import default_values, value_at
from recipe_gkd.config.key_types import known_keys
from recipe_gkd.config.keys import key_name
from recipe_gkd.config.load import LoadedConfig, read_config
from recipe_gkd.config.schema.unused import (
    NO_MEGATRON,
    NO_REWARDED_RESPONSE,
    NO_SCORING_WORKERS,
    NO_SERVICE,
    NO_SUPPORT_IDS,
    RECORDED,
    UnusedWhen,
)
from recipe_gkd.config.unused_keys import unused_conditions, unused_key_problems
from tests._support import custom_losses
from tests._support.base_config import CONFIG_NAME, REQUIRED

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TEACHER, HYBRID = "actor_rollout_ref.teacher", "actor_rollout_ref.hybrid_engine"
REWARD = "custom_reward_function.path=reward.py"
SYNC = "trainer.scheduler=sync"
VALIDATION = ("trainer.test_freq=10", "data.val_files=[val.parquet]", REWARD)
LOSS = f"gkd.custom_loss={{path: {custom_losses.__file__}, name: forward_kl}}"

# Overrides with which keys are unused, for those that the default configuration reads. By first key and reason.
CONDITIONS: dict[tuple[str, str], tuple[str, ...]] = {
    (f"{ACTOR}.max_token_len", f"{ACTOR}.use_dynamic_bsz"): (f"{ACTOR}.use_dynamic_bsz=false",),
    (f"{ACTOR}.megatron.use_distributed_optimizer", f"{ACTOR}.strategy"): (f"{ACTOR}.strategy=fsdp",),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", f"{ACTOR}.optim.lr_warmup_steps"): (f"{ACTOR}.optim.lr_warmup_steps=5",),
    (f"{ACTOR}.checkpoint.save_contents", "trainer.save_freq"): ("trainer.save_freq=-1",),
    (f"{ACTOR}.checkpoint.load_contents", "trainer.resume_mode"): ("trainer.resume_mode=disable",),
    ("data.teacher_prompt_key", "gkd.enable_teacher"): ("gkd.enable_teacher=false", "gkd.sft_share=1"),
    (f"{TEACHER}.top_k", f"{TEACHER}.support"): (f"{TEACHER}.support=student",),
    (f"{TEACHER}.server_ip", f"{TEACHER}.teachers"): (f"{TEACHER}.teachers.a=host:1",),
    ("gkd.distill_loss_type", "gkd.custom_loss.path"): (LOSS,),
    ("gkd.tail", "gkd.distill_loss_type"): ("gkd.distill_loss_type=k1",),
    ("gkd.sft_loss_coef", "gkd.sft_target"): ("gkd.sft_share=0.5", "gkd.sft_target=teacher"),
    ("gkd.warmup_steps", "gkd.sft_share"): ("gkd.sft_share=1",),
    (f"{TEACHER}.path", "gkd.sft_target"): ("gkd.sft_share=0.5",),
    (f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.temperature"): VALIDATION,
    (f"{ROLLOUT}.top_p", f"{ROLLOUT}.temperature"): (f"{ROLLOUT}.temperature=0",),
    ("custom_reward_function.path", "custom_reward_function.on_training"): (
        "custom_reward_function.on_training=false",
    ),
    ("custom_reward_function.functions", "custom_reward_function.on_training"): (
        "custom_reward_function.on_training=false",
    ),
    ("custom_reward_function.name", "custom_reward_function.functions"): (
        "custom_reward_function.functions.format=rewards.py",
    ),
    ("custom_reward_function.max_failures", "custom_reward_function.on_failure"): (
        REWARD,
        "custom_reward_function.on_failure=fail",
    ),
    (f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.kv_cache_memory_megabytes"): (
        f"{ROLLOUT}.kv_cache_memory_megabytes=100",
    ),
    (f"{ROLLOUT}.mismatch_patience", f"{ROLLOUT}.mismatch_bound"): (f"{ROLLOUT}.mismatch_bound=null",),
    (f"{ROLLOUT}.gpu_memory_utilization", "trainer.device"): ("trainer.device=cpu",),
    ("rollout.max_environment_failures", "rollout.on_environment_failure"): (
        "rollout.environment=environment.py:Shop",
        "rollout.on_environment_failure=fail",
    ),
    ("rollout.nnodes", HYBRID): (f"{HYBRID}=true", SYNC),
    ("trainer.total_epochs", "trainer.total_training_steps"): ("trainer.total_training_steps=5",),
}
# Overrides that the enabling override needs to be valid.
COMPANIONS: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.megatron.tensor_model_parallel_size": ("trainer.n_gpus_per_node=2",),
    "gkd.use_rl_loss": (REWARD, f"{ROLLOUT}.n=4"),
    "trainer.test_freq": VALIDATION,
    HYBRID: (SYNC,),
    "gkd.custom_loss.path": ("gkd.custom_loss.name=null",),
}
# Values of keys whose default selects nothing.
VALUES = {
    "rollout.environment_kwargs": "{level: 2}",
    "rollout.environment_python": "python3.11",
    "rollout.tool_parser": "hermes",
    "rollout.max_tool_response_length": "1024",
    "rollout.conversation_timeout_s": "9",
    "rollout.max_environment_failures": "9",
    f"{ACTOR}.megatron.sequence_parallel": "true",
    f"{ROLLOUT}.async_scheduling": "false",
    "trainer.max_actor_ckpt_to_keep": "2",
    "data.val_files": "[val.parquet]",
    "data.teacher_prompt_key": "seen",
    f"{TEACHER}.prompt_template": "seen",
    f"{TEACHER}.n_server_workers": "2",
    f"{TEACHER}.max_rows_gb": "1.5",
    f"{TEACHER}.cache_dir": "scores",
    f"{TEACHER}.path": "recording",
    "gkd.warmup_steps": "5",
    f"{TEACHER}.top_k": "8",
    f"{TEACHER}.auth_dir": "keys",
    "gkd.max_loss_position": "8",
    "gkd.token_clip": "2.0",
    "gkd.position_weights_key": "weight",
    "gkd.position_weights": f"{custom_losses.__file__}:share_of_response",
    "custom_reward_function.path": "reward.py",
    "custom_reward_function.kwargs": "{scale: 2}",
    "custom_reward_function.on_failure": "skip",
    "custom_reward_function.max_failures": "9",
    "custom_reward_function.functions": "{format: rewards.py}",
    "trainer.val_kl": "true",
}


def read(*overrides: str) -> LoadedConfig:
    return read_config(CONFIG_NAME, [*REQUIRED, *overrides])


def setting(name: str) -> str:
    """Return an override that sets the key, to its default if that is a value."""
    value = VALUES.get(name, value_at(default_values(CONFIG_NAME), name))
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}".replace("'", "").replace(" ", "")


def rules() -> list[tuple[UnusedWhen, tuple[str, ...]]]:
    """Return each condition of the schema with the keys that have it. Keys that exclude each other are separate."""
    found: dict[UnusedWhen, tuple[str, ...]] = {}
    for name, field in known_keys().items():
        for unused in unused_conditions(field):
            found[unused] = (*found.get(unused, ()), name)
    exclusive = [(NO_REWARDED_RESPONSE, (name,)) for name in found.pop(NO_REWARDED_RESPONSE)]
    return [*found.items(), *exclusive]


RULES = rules()


def warned_with(unused: UnusedWhen, keys: tuple[str, ...], warnings: list[str]) -> set[str]:
    """Return those of the keys that warnings name with the reason of the condition."""
    found = (text for text in warnings if f" has no effect with {key_name(unused.because)}=" in text)
    return {text.partition("=")[0] for text in found} & set(keys)


def rule_id(part: Any) -> str:
    return key_name(part.because) if isinstance(part, UnusedWhen) else str(part[0])


def test_conditions_of_the_schema_are_found() -> None:
    assert len(RULES) > 40


@pytest.mark.parametrize(("unused", "keys"), RULES, ids=rule_id)
def test_unused_key_is_reported_until_it_is_enabled(unused: UnusedWhen, keys: tuple[str, ...]) -> None:
    because = key_name(unused.because)
    conditions = CONDITIONS.get((keys[0], because), ())
    others = [text for text in conditions if text.partition("=")[0] not in keys]
    settings = [*(setting(name) for name in keys), *others]
    warnings = list(read(*settings).warnings)
    assert warned_with(unused, keys, warnings) == set(keys)
    remedy = unused.remedy or f"set {because}={unused.enable}"
    assert all(f"{remedy}, or leave" in text for text in warnings if because in text)

    kept = [text for text in settings if not text.startswith((f"{because}=", f"{because}."))]
    companions = [text for text in COMPANIONS.get(because, ()) if text not in kept]
    loaded = read(*kept, *companions, f"{because}={unused.enable}")
    assert not unused.condition(loaded.config) and not warned_with(unused, keys, list(loaded.warnings))


REFUSED = [(name, rule) for name, field in known_keys().items() for rule in field.metadata["refused"]]
REFUSED_IF = {
    NO_MEGATRON: (f"{ACTOR}.strategy=fsdp",),
    NO_SERVICE: (f"{TEACHER}.backend=hf", f"{TEACHER}.model_path=x"),
    NO_SUPPORT_IDS: (f"{TEACHER}.backend=http", f"{TEACHER}.url=http://host:1"),
    RECORDED: (f"{TEACHER}.backend=recorded", f"{TEACHER}.path=x", "gkd.sft_share=1", "gkd.sft_target=teacher"),
    NO_SCORING_WORKERS: (f"{TEACHER}.backend=hf", f"{TEACHER}.model_path=x"),
}


@pytest.mark.parametrize(("name", "unused"), REFUSED, ids=lambda part: part if isinstance(part, str) else rule_id(part))
def test_other_value_than_default_is_refused_if_nothing_reads_it(name: str, unused: UnusedWhen) -> None:
    config = read(*REFUSED_IF.get(unused, ())).config
    section, _, field = name.rpartition(".")
    object.__setattr__(attrgetter(section)(config), field, "other")
    [problem] = [problem for problem in unused_key_problems(config) if problem.keys[0] == name]
    assert problem.keys == (name, key_name(unused.because)) and problem.remedy.endswith(f"={unused.enable}")


def test_keys_of_both_training_backends_are_refused() -> None:
    sections = [name.rpartition(".")[0] for name, _ in REFUSED]
    assert [sections.count(f"{ACTOR}.{section}") for section in ("megatron", "fsdp_config", "lora")] == [12, 6, 2]


def test_keys_that_the_user_did_not_set_are_not_reported() -> None:
    assert not read().warnings
    assert not read(f"{ROLLOUT}.kv_cache_memory_megabytes=null", "data.val_files=[]").warnings


def test_mapping_sets_each_of_its_keys() -> None:
    [warning] = read("gkd={beta: 0.3, distill_loss_coef: 2}").warnings
    assert warning.startswith("gkd.beta=0.3 has no effect with gkd.distill_loss_type=forward_kl; set gkd.distill_los")


@pytest.mark.parametrize(
    "name", ["quickstart", "on_policy_distill_simple", "quickstart_simple", "quickstart_qwen3_moe"]
)
def test_values_of_package_files_are_not_reported(name: str, tmp_path: Path) -> None:
    assert not read_config(name, REQUIRED).warnings
    (tmp_path / "base.yaml").write_text(f"defaults: [{name}, _self_]\ntrainer: {{experiment_name: mine}}\n")
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\ngkd: {rkl_ratio: 0.25}\n")
    [warning] = read_config("mine", REQUIRED, tmp_path).warnings
    assert warning.startswith("gkd.rkl_ratio=0.25 has no effect with gkd.distill_loss_type=forward_kl")


@pytest.mark.parametrize("override", ["hydra.run.dir=x", "+hydra.sweep.dir=x"])
def test_settings_of_hydra_have_no_effect(override: str) -> None:
    [warning] = read(override).warnings
    assert f"{override.lstrip('+').partition('=')[0]} has no effect" in warning


@pytest.fixture
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the handlers and levels that the training command sets."""
    root, log = logging.getLogger(), logging.getLogger("recipe_gkd")
    handlers, level = root.handlers[:], log.level
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    log.setLevel(level)


@pytest.mark.usefixtures("restored_logging")
def test_warnings_are_printed_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*REQUIRED, "gkd.beta=0.3", f"trainer.default_local_dir={tmp_path}/run"]
    assert main_gkd.main(["--cfg", "job", *arguments]) == 0
    assert capsys.readouterr().err.startswith("warning: gkd.beta=0.3 has no effect")

    monkeypatch.setattr("recipe_gkd.run.run", lambda *_: None)
    monkeypatch.setattr(main_gkd, "raise_on_signals", lambda: None)
    assert main_gkd.main(arguments) == 0
    assert "W recipe_gkd: gkd.beta=0.3 has no effect" in (tmp_path / "run" / "run.log").read_text()


def test_async_scheduling_is_reported_on_a_cpu_only() -> None:
    setting = f"{ROLLOUT}.async_scheduling=false"
    assert not read(setting, "trainer.device=cuda").warnings
    assert f"{setting} has no effect with trainer.device=cpu" in "".join(read(setting, "trainer.device=cpu").warnings)
