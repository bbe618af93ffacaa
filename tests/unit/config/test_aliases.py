"""Keys of other projects, unknown keys, and the reference of the keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe_gkd.config.__main__ import main as print_keys
from recipe_gkd.config.aliases import find_alias, migration_tables, unknown_key_message
from recipe_gkd.config.foreign_keys import PROJECTS, ForeignKey
from recipe_gkd.config.load import known_keys, read_config
from recipe_gkd.config.overrides import OverrideRules
from recipe_gkd.errors import ConfigError
from tests._support.base_config import CONFIG_NAME, REQUIRED
from tests._support.repository import REPO

KNOWN = list(known_keys())
ENTRIES = [entry for project in PROJECTS for entry in project.keys]
NAMES = [name for entry in ENTRIES for name in entry.names]
RULES = OverrideRules(known=KNOWN, free_form=(), is_group=lambda name: False)


def rejection(*overrides: str, folder: Path | None = None, name: str = CONFIG_NAME) -> str:
    """Return the message with which a configuration is rejected."""
    with pytest.raises(ConfigError) as caught:
        read_config(name, overrides, folder)
    return str(caught.value)


class TestTable:
    def test_each_name_has_one_entry_and_is_no_key_of_ours(self) -> None:
        assert len(set(NAMES)) == len(NAMES)
        assert not set(NAMES) & set(KNOWN)
        assert {entry.key for entry in ENTRIES if entry.key} <= set(KNOWN)

    @pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.names[0])
    def test_override_is_translated_or_refused_with_advice(self, entry: ForeignKey) -> None:
        for name in (pattern.replace("*", "name") for pattern in entry.names):
            for prefix in ("", "+", "++"):
                checked = RULES.check([f"{prefix}{name}=1"])
                if entry.key is None:
                    assert not checked.accepted and entry.advice and entry.advice in checked.problems[0]
                else:
                    assert checked.accepted == (f"{entry.key}=1",) and checked.keys == {entry.key}
                    assert f"write {entry.key}" in checked.warnings[0] and not checked.problems

    def test_complete_name_takes_precedence_over_pattern(self) -> None:
        alias = find_alias("distillation.distillation_loss.topk")
        assert alias and alias.key == "actor_rollout_ref.teacher.top_k"

    def test_migration_page_contains_the_tables(self) -> None:
        page = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
        for project, table in migration_tables().items():
            assert f"\n\n{table}\n\n" in page, f"{project}: write it with python -m recipe_gkd.config --migration"


class TestOverrides:
    def test_foreign_key_sets_ours_with_a_warning(self) -> None:
        loaded = read_config(CONFIG_NAME, [*REQUIRED, "++gkd.teacher_ip=10.0.0.1", "max_new_tokens=77"])
        assert loaded.config.actor_rollout_ref.teacher.server_ip == "10.0.0.1"
        assert loaded.config.data.max_response_length == 77
        assert [text.split(" is a key of ")[0] for text in loaded.warnings] == ["gkd.teacher_ip", "max_new_tokens"]

    def test_value_of_foreign_key_is_checked(self) -> None:
        message = rejection(*REQUIRED, "gkd.teacher_port=70000")
        assert message.startswith("actor_rollout_ref.teacher.server_port: got 70000;")

    def test_removal_of_foreign_key_is_refused(self) -> None:
        assert "write data.max_response_length" in rejection(*REQUIRED, "~max_new_tokens")

    def test_all_problems_are_in_one_message(self) -> None:
        message = rejection(
            "trainer.sheduler=sync", "gkd={bta: 1}", "lmbda=0.5", "nothing", "data.train_batch_size=none"
        )
        assert message.splitlines() == [
            "unknown key trainer.sheduler: did you mean trainer.scheduler?",
            "unknown key gkd.bta: did you mean gkd.beta?",
            "unknown key lmbda: it is a key of TRL; `gkd.sft_share` = 1 - `lmbda`, with `gkd.sft_target=teacher`",
            "the override 'nothing' is not of the form key=value: missing EQUAL at '<EOF>'",
            "these keys have no default and must be set; add to the command:",
            "  actor_rollout_ref.model.path=...",
            "  data.train_files=...",
            "data.train_batch_size: got 'none'; input should be a valid integer, unable to parse string as an integer",
        ]

    def test_unknown_keys_of_user_file_are_all_reported(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(
            f"defaults: [{CONFIG_NAME}, _self_]\n"
            "trainer: {schedule: sync}\nalgorithm: {adv_estimator: grpo}\npolicy: {generation: {top_p: 0.9}}\n"
        )
        message = rejection(*REQUIRED, folder=tmp_path, name="mine")
        assert "unknown key trainer.schedule: did you mean trainer.scheduler?" in message
        assert "unknown key algorithm.adv_estimator: it is a key of verl; `gkd.use_rl_loss=true`" in message
        assert (
            "unknown key policy.generation.top_p: it is a key of NeMo-RL; write actor_rollout_ref.rollout." in message
        )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gkd.bata", "did you mean gkd.beta?"),
        ("gkd.btea", "did you mean gkd.beta?"),
        ("trainer.n_gpu_per_node", "did you mean trainer.n_gpus_per_node?"),
        ("trianer.nnodes", "did you mean trainer.nnodes?"),
        ("optim.lr", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("rollout.temprature", "did you mean actor_rollout_ref.rollout.temperature?"),
        ("gkd.tau", "`python -m recipe_gkd.config gkd` lists the keys of the section gkd"),
        ("gkd.teacher_address", "`python -m recipe_gkd.config gkd` lists the keys of the section gkd"),
        ("gkd.one.two", "`python -m recipe_gkd.config gkd` lists the keys of the section gkd"),
        ("trainer.n", "did you mean actor_rollout_ref.rollout.n?"),
        ("unheard.of", "`python -m recipe_gkd.config` lists the keys"),
    ],
)
def test_unknown_key_suggests_only_similar_names(name: str, answer: str) -> None:
    assert unknown_key_message(name, KNOWN) == f"unknown key {name}: {answer}"


class TestReferenceCommand:
    def test_help_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            print_keys(["--help"])
        assert capsys.readouterr().out.startswith("usage: python -m recipe_gkd.config")

    def test_section_and_part_of_a_name_select_keys(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert print_keys(["ray_init", "trainer.save_freq"]) == 0
        names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
        assert names == ["trainer.save_freq", *(key for key in KNOWN if key.startswith("ray_init."))]
        assert print_keys(["save_fr"]) == 0
        assert capsys.readouterr().out.startswith("trainer.save_freq  (default: 100)\n    Number of steps")

    def test_unknown_key_is_answered(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert print_keys(["gkd.teacher_ip"]) == 1
        assert "write actor_rollout_ref.teacher.server_ip" in capsys.readouterr().err

    def test_migration_tables_are_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert print_keys(["--migration"]) == 0
        assert all(table in capsys.readouterr().out for table in [migration_tables()["TRL"]])
