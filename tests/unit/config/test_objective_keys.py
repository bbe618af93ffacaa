"""Configuration of the objective: enumerated values, the custom loss, and the kernel backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.config.__main__ import reference
from recipe_gkd.config.conditions import uses_custom_loss, uses_sampled_token_loss
from recipe_gkd.config.objective import loss_name
from recipe_gkd.errors import ConfigError
from recipe_gkd.losses.distributions import TAIL_MODES
from recipe_gkd.losses.kernel_backend import KERNEL_BACKENDS
from recipe_gkd.losses.registry import loss_names, sampled_token_loss_names
from recipe_gkd.losses.sampled_token import IMPORTANCE_MODES
from tests._support import custom_losses
from tests._support.base_config import base_config
from tests._support.errors import raises

CHOICES = {
    "gkd.distill_loss_type": loss_names(),
    "gkd.tail": TAIL_MODES,
    "gkd.importance": IMPORTANCE_MODES,
    "gkd.kernel_backend": KERNEL_BACKENDS,
}
FILE = Path(custom_losses.__file__)


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


class TestEnumeratedKeys:
    @pytest.mark.parametrize(("key", "value"), [(key, value) for key in CHOICES for value in CHOICES[key]])
    def test_defined_value_is_accepted(self, key: str, value: str) -> None:
        assert value_of(base_config(f"{key}={value}"), key) == value

    @pytest.mark.parametrize("key", CHOICES)
    def test_other_value_is_refused_with_the_choices(self, key: str) -> None:
        with raises(ConfigError, keys=(key,)) as caught:
            base_config(f"{key}=other")
        assert ", ".join(CHOICES[key]) in str(caught.value)

    @pytest.mark.parametrize("key", CHOICES)
    def test_reference_table_lists_the_choices(self, key: str) -> None:
        [row] = [line for line in reference().splitlines() if line.startswith(f"| `{key}` |")]
        assert "One of " + ", ".join(f"`{value}`" for value in CHOICES[key]) + "." in row

    def test_former_spelling_of_renormalize_is_accepted(self) -> None:
        assert base_config("gkd.tail=renormalise").gkd.tail == "renormalize"

    def test_sampled_token_losses_are_recognized(self) -> None:
        for name in loss_names():
            gkd = base_config(f"gkd.distill_loss_type={name}").gkd
            assert uses_sampled_token_loss(gkd) == (name in sampled_token_loss_names())


class TestCustomLoss:
    def test_path_becomes_absolute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(FILE.parent)
        gkd = base_config(f"gkd.custom_loss.path={FILE.name}", "gkd.custom_loss.name=forward_kl").gkd
        assert gkd.custom_loss.path == str(FILE.resolve()) and uses_custom_loss(gkd)

    @pytest.mark.parametrize(
        ("path", "name", "keys"),
        [
            ("missing.py", "forward_kl", ("gkd.custom_loss",)),
            (FILE, "missing", ("gkd.custom_loss",)),
            (FILE, "detached_loss", ("gkd.custom_loss",)),
            (FILE, "null", ("gkd.custom_loss.path", "gkd.custom_loss.name")),
            ("null", "forward_kl", ("gkd.custom_loss.path", "gkd.custom_loss.name")),
        ],
    )
    def test_invalid_custom_loss_is_refused(self, path: object, name: str, keys: tuple[str, ...]) -> None:
        with raises(ConfigError, keys=keys):
            base_config(f"gkd.custom_loss.path={path}", f"gkd.custom_loss.name={name}")

    def test_group_baseline_has_no_effect_and_is_refused(self) -> None:
        custom = [f"gkd.custom_loss.path={FILE}", "gkd.custom_loss.name=forward_kl"]
        with raises(ConfigError, keys=("gkd.baseline", "gkd.custom_loss.path")):
            base_config(*custom, "gkd.baseline=group", "gkd.distill_loss_type=k1", "actor_rollout_ref.rollout.n=4")

    def test_advantages_without_policy_loss_are_accepted(self) -> None:
        custom = [f"gkd.custom_loss.path={FILE}", "gkd.custom_loss.name=all_statistics"]
        reward = ["custom_reward_function.path=reward.py", "actor_rollout_ref.rollout.n=4"]
        base_config(*custom, *reward, "gkd.use_rl_loss=true", "gkd.rl_loss_coef=0")


class TestLossName:
    def test_configuration_and_stored_configuration_have_the_same_name(self) -> None:
        for custom, wanted in ((None, "jsd"), ("my_loss", "my_loss")):
            config = base_config()
            gkd = dataclasses.replace(
                config.gkd,
                distill_loss_type="jsd",
                custom_loss=dataclasses.replace(config.gkd.custom_loss, name=custom, path=custom and "/loss.py"),
            )
            assert loss_name(gkd) == loss_name(dataclasses.asdict(gkd)) == wanted

    def test_stored_configuration_without_a_loss_has_no_name(self) -> None:
        assert loss_name({}) is None
