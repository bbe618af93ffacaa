"""Keys about time limits, metrics and profiles: accepted forms, and refused combinations."""

from __future__ import annotations

import pytest

from recipe_gkd.config.durations import duration_s, to_clock
from recipe_gkd.errors import ConfigError
from tests._support.base_config import base_config
from tests._support.errors import raises


class TestDuration:
    @pytest.mark.parametrize(
        ("text", "seconds"), [("00:00:01", 1), ("3:50:00", 13800), ("48:00:00", 172800), ("1-02:03:04", 93784)]
    )
    def test_forms_of_batch_systems_are_read(self, text: str, seconds: int) -> None:
        assert duration_s(text) == seconds

    @pytest.mark.parametrize("text", ["", "90", "30:00", "1:60:00", "00:00:00", "1-2", "-1:00:00", "1h"])
    def test_other_forms_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError):
            duration_s(text)

    def test_number_of_yaml_is_a_time(self) -> None:
        """YAML reads an unquoted ``3:50:00`` as 13800."""
        assert to_clock(13800) == "03:50:00" and to_clock(True) is True


class TestKeys:
    def test_valid_values_are_kept(self) -> None:
        trainer = base_config(
            "trainer.save_before=1-03:50:00", "trainer.profile.steps=[3,4]", "trainer.metrics_port=0"
        ).trainer
        assert (trainer.save_before, trainer.profile.steps, trainer.metrics_port) == ("1-03:50:00", [3, 4], 0)
        assert base_config("trainer.save_before=13800").trainer.save_before == "03:50:00"

    @pytest.mark.parametrize(
        ("overrides", "keys"),
        [
            (["trainer.save_before=30m"], ("trainer.save_before",)),
            (["trainer.save_before=01:00:00", "trainer.save_freq=-1"], ("trainer.save_before", "trainer.save_freq")),
            (["trainer.profile.steps=[1]", "trainer.profile.ranks=[0,2]"], ("trainer.profile.ranks",)),
            (["trainer.profile.steps=[0]"], ("trainer.profile.steps",)),
            (["trainer.metrics_port=65536"], ("trainer.metrics_port",)),
        ],
    )
    def test_refused_values_are_named(self, overrides: list[str], keys: tuple[str, ...]) -> None:
        with raises(ConfigError, keys=keys):
            base_config(*overrides)
