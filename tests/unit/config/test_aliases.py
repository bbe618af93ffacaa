"""Keys of other projects, unknown keys, and the reference of the keys."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipe_gkd.config.__main__ import main as print_keys
from recipe_gkd.config.aliases import find_alias, migration_tables, unknown_key_error
from recipe_gkd.config.foreign_keys import PROJECTS, ForeignKey
from recipe_gkd.config.key_types import keys_of_type, known_keys
from recipe_gkd.config.load import read_config
from recipe_gkd.config.overrides import OverrideRules
from recipe_gkd.errors import ConfigError
from tests._support.base_config import CONFIG_NAME, REQUIRED
from tests._support.errors import raises
from tests._support.repository import REPO

KNOWN = list(known_keys())
ENTRIES = [entry for project in PROJECTS for entry in project.keys]
NAMES = [name for entry in ENTRIES for name in entry.names]
LISTS = keys_of_type(list)
RULES = OverrideRules(known=KNOWN, free_form=(), is_group=lambda name: False, lists=LISTS)


def rejection(*overrides: str, folder: Path | None = None, name: str = CONFIG_NAME) -> ConfigError:
    """Return the error with which a configuration is rejected."""
    with raises(ConfigError) as caught:
        read_config(name, overrides, folder)
    return caught.value


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
                if entry.key is None and entry.translate("1") is None:
                    assert not checked.accepted and entry.advice and checked.problems[0].remedy == entry.advice
                elif entry.key is None:
                    assert entry.advice and not checked.problems and len(checked.warnings) == 1
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
        error = rejection(*REQUIRED, "gkd.teacher_port=70000")
        assert error.keys == ("actor_rollout_ref.teacher.server_port", "gkd.teacher_port")

    def test_removal_of_foreign_key_is_refused(self) -> None:
        error = rejection(*REQUIRED, "~max_new_tokens")
        assert error.keys == ("max_new_tokens",) and error.suggestions == ("data.max_response_length",)

    def test_all_problems_are_in_one_error(self) -> None:
        error = rejection("trainer.sheduler=sync", "gkd={bta: 1}", "lmbda=0.5", "nothing", "data.train_batch_size=none")
        assert [(part.keys, part.suggestions) for part in error.parts] == [
            (("trainer.sheduler",), ("trainer.scheduler",)),
            (("gkd.bta",), ("gkd.beta",)),
            (("lmbda",), ()),
            (("nothing",), ()),
            (("actor_rollout_ref.model.path", "data.train_files"), ()),
            (("data.train_batch_size",), ()),
        ]
        assert str(error) == "\n".join(map(str, error.parts))

    def test_unknown_keys_of_user_file_are_all_reported(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text(
            f"defaults: [{CONFIG_NAME}, _self_]\n"
            "trainer: {schedule: sync}\nalgorithm: {adv_estimator: grpo}\npolicy: {generation: {top_p: 0.9}}\n"
        )
        error = rejection(*REQUIRED, folder=tmp_path, name="mine")
        assert {part.keys[0]: part.suggestions for part in error.parts} == {
            "trainer.schedule": ("trainer.scheduler",),
            "algorithm.adv_estimator": (),
            "policy.generation.top_p": ("actor_rollout_ref.rollout.top_p",),
        }


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [
        ("gkd.bata", ("gkd.beta",)),
        ("gkd.btea", ("gkd.beta",)),
        ("trainer.n_gpu_per_node", ("trainer.n_gpus_per_node",)),
        ("trianer.nnodes", ("trainer.nnodes",)),
        ("optim.lr", ("actor_rollout_ref.actor.optim.lr",)),
        ("rollout.temprature", ("actor_rollout_ref.rollout.temperature",)),
        ("gkd.tau", ()),
        ("gkd.teacher_address", ()),
        ("gkd.one.two", ()),
        ("trainer.n", ()),
        ("profiler.ranks", ("trainer.profile.ranks",)),
        ("actor_rollout_ref.rollout.context_parallel_size", ()),
        ("actor_rollout_ref.actor.rank", ("actor_rollout_ref.actor.lora.rank",)),
        ("unheard.of", ()),
    ],
)
def test_unknown_key_suggests_only_similar_names(name: str, suggestions: tuple[str, ...]) -> None:
    error = unknown_key_error(name, KNOWN)
    assert error.keys == (name,) and error.suggestions == suggestions


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("gkd.one.two", "recipe_gkd.config gkd`"),
        ("actor_rollout_ref.rollout.context_parallel_size", "recipe_gkd.config actor_rollout_ref.rollout`"),
        ("unheard.of", "recipe_gkd.config`"),
    ],
)
def test_remedy_for_unknown_key_lists_its_section(name: str, command: str) -> None:
    assert unknown_key_error(name, KNOWN).remedy.endswith(command)


OVERRIDES_OF_VERL = [
    line
    for line in Path(__file__).with_name("verl_gkd_overrides.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
OTHER_KEYS = [
    "vllm_load_weights_size",
    "actor_rollout_ref.actor.profiler.tool",
    "global_profiler.save_path",
    "kd_loss_type",
    "jsd_alpha",
    "trainer.ray_wait_register_center_timeout",
    "trainer.esi_redundant_time",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.expert_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.optim.lr_decay_steps",
    "actor_rollout_ref.actor.optim.lr_wsd_decay_style",
    "actor_rollout_ref.actor.optim.optimizer",
    "actor_rollout_ref.actor.optim.lr_warmup_init",
    "actor_rollout_ref.actor.optim.weight_decay_incr_style",
    "actor_rollout_ref.actor.optim.lr_wsd_decay_steps",
    "actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler",
    "data.custom_cls.path",
    "data.sampler.class_path",
    "data.return_multi_modal_inputs",
    "actor_rollout_ref.actor.megatron.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "actor_rollout_ref.actor.load_weight",
    "actor_rollout_ref.model.custom_chat_template",
    "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.model.override_config.model_config",
    "actor_rollout_ref.rollout.ignore_eos",
    "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "actor_rollout_ref.rollout.layer_name_map.qkv_layer_name",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "gkd.temperature",
    "gkd.loss",
    "trainer.total_steps",
    "trainer.max_steps",
    "trainer.epochs",
    "trainer.val_only",
    "trainer.validation_data_dir",
    "data.batch_size",
    "actor_rollout_ref.actor.optim.learning_rate",
    "optim.learning_rate",
    "optim.lr_scheduler_type",
    "optim.warmup_style",
    "logging_steps",
    "use_peft",
    "optim",
    "packing",
    "attn_implementation",
    "save_strategy",
    "eval_strategy",
    "policy.generation.colocated.enabled",
]


ROLLOUT = "actor_rollout_ref.rollout"


class TestConflicts:
    """Two names of one key with different values."""

    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            ((f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.temperature=1.0"), f"{ROLLOUT}.temperature"),
            (("gkd.distill_loss=jsd", "++gkd.loss_type=reverse_kl"), "gkd.distill_loss_type"),
            (("max_steps=10", "trainer={total_training_steps: 20}"), "trainer.total_training_steps"),
            (("policy.generation.colocated.enabled=true", "trainer.scheduler=one_step_off"), "trainer.scheduler"),
        ],
    )
    def test_different_values_are_refused_in_each_order(self, overrides: tuple[str, str], key: str) -> None:
        for texts in (overrides, overrides[::-1]):
            assert rejection(*REQUIRED, *texts).keys == (key,)

    @pytest.mark.parametrize(
        "overrides",
        [
            (f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.temperature=0.0"),
            ("gkd.loss_type=jsd", "gkd.distill_loss_type='jsd'"),
            ("trainer.save_freq=10", "++trainer.save_freq=20"),
            ("trainer={save_freq: 10}", "trainer.save_freq=20"),
            ("max_steps=10", "max_steps=20"),
        ],
    )
    def test_same_value_or_same_name_is_accepted(self, overrides: tuple[str, str]) -> None:
        assert not RULES.check(overrides).problems


class TestOtherProjects:
    """Keys that users of other projects wrote."""

    @pytest.mark.parametrize("name", OTHER_KEYS)
    def test_key_is_answered(self, name: str) -> None:
        alias = find_alias(name)
        assert alias and (alias.key or alias.entry.advice)

    @pytest.mark.parametrize(
        ("override", "ours"),
        [
            ("gkd.temperature=2", ("gkd.distill_temperature=2",)),
            ("gkd.loss=jsd", ("gkd.distill_loss_type=jsd",)),
            ("policy.generation.colocated.enabled=false", ("actor_rollout_ref.hybrid_engine=false",)),
            (
                "policy.generation.colocated.enabled=True",
                ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync"),
            ),
            ("+actor_rollout_ref.actor.distill_loss.name=rkl", ("gkd.distill_loss_type=reverse_kl",)),
            ("loss_add_tail=false", ("gkd.tail=renormalize",)),
            ("use_peft=false", ()),
            ("trainer.val_only=false", ()),
            ("trainer.default_hdfs_dir=null", ()),
            ("max_steps=-1", ("trainer.total_training_steps=null",)),
            ("max_steps=100", ("trainer.total_training_steps=100",)),
            ("trainer.max_steps=-1", ("trainer.total_training_steps=null",)),
        ],
    )
    def test_value_decides(self, override: str, ours: tuple[str, ...]) -> None:
        checked = RULES.check([override])
        assert checked.accepted == ours and not checked.problems and len(checked.warnings) == 1

    @pytest.mark.parametrize("override", ["trainer.val_only=true", "use_peft=true", "lmbda=0.5"])
    def test_value_with_another_meaning_is_refused(self, override: str) -> None:
        assert RULES.check([override]).problems

    def test_value_in_a_file_decides_the_advice(self) -> None:
        error = unknown_key_error("policy.generation.colocated.enabled", KNOWN, value=False)
        assert error.suggestions == ("actor_rollout_ref.hybrid_engine",)

    def test_override_of_verl_is_accepted_or_answered(self) -> None:
        """Check the numbers of docs/migration.md."""
        rules = OverrideRules(known=KNOWN, free_form=keys_of_type(dict), is_group=lambda name: False)
        checked = {override: rules.check([override]) for override in OVERRIDES_OF_VERL}
        refused = [override for override, one in checked.items() if one.problems]
        aliases = [find_alias(checked[override].problems[0].keys[0]) for override in refused]
        assert all(alias is not None and alias.project.startswith("verl") for alias in aliases)
        n_accepted = len(checked) - len(refused)
        page = (REPO / "docs" / "migration.md").read_text(encoding="utf-8")
        assert f"Of the {len(checked)} overrides" in page and f"{n_accepted} are accepted" in page, n_accepted

    def test_all_defaults_of_verl_are_one_valid_configuration(self) -> None:
        end = next(i for i, override in enumerate(OVERRIDES_OF_VERL) if override.startswith("+"))
        refused = ("trainer.val_before_train=True", "actor_rollout_ref.actor.micro_batch_size=")
        loaded = read_config(CONFIG_NAME, [text for text in OVERRIDES_OF_VERL[:end] if not text.startswith(refused)])
        assert loaded.config.data.val_files == [] and loaded.config.trainer.profile.steps == []
        assert loaded.config.actor_rollout_ref.actor.optim.lr_warmup_steps == -1
        assert any("sequence_parallel=true has no effect" in text for text in loaded.warnings)


class TestGrammar:
    """The proposed form of an override that Hydra cannot parse gives the value that was written."""

    @pytest.mark.parametrize("key", ["data.train_files", "trainer.logger", "custom_reward_function.path"])
    @pytest.mark.parametrize(
        "value",
        ["/data/a=b/train.parquet", "/data/a,b.parquet", "/data/(1)/t.parquet", "/data/größe=1", "it's=1", "a=\\"],
    )
    def test_one_value_is_shown_quoted(self, key: str, value: str) -> None:
        assert proposed_value(f"{key}={value}") == ([value] if key in LISTS else value)

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("trainer.logger=console,jsonl", ["console", "jsonl"]),
            ("trainer.profile.steps=1,2", [1, 2]),
            ("data.train_files=/a b.parquet,/x=1/c.parquet", ["/a b.parquet", "/x=1/c.parquet"]),
        ],
    )
    def test_several_values_of_a_list_key_are_shown_as_a_list(self, override: str, expected: list[object]) -> None:
        assert proposed_value(override, "as a list: ") == expected

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("data.train_files=[/x=1/a.parquet,/b.parquet]", ["/x=1/a.parquet", "/b.parquet"]),
            ("data.train_files=[/x=1/a, '/b,c', ~/d(1)]", ["/x=1/a", "/b,c", "~/d(1)"]),
            ("trainer.profile.steps=[1,2=]", [1, "2="]),
            ("custom_reward_function.kwargs={n: 2, file: /x=1/a}", {"n": 2, "file": "/x=1/a"}),
            ("custom_reward_function.path=[a=b]", "[a=b]"),
        ],
    )
    def test_elements_of_a_list_or_mapping_are_shown_quoted(self, override: str, expected: object) -> None:
        assert proposed_value(override) == expected

    def test_proposed_list_is_accepted_by_the_schema(self) -> None:
        remedy = rejection(*REQUIRED, "trainer.logger=console,jsonl").remedy
        (override,) = shlex.split(remedy.split("list: ")[1].split(";")[0])
        assert read_config(CONFIG_NAME, [*REQUIRED, override]).config.trainer.logger == ["console", "jsonl"]


def proposed_value(override: str, before: str = "shell: ") -> object:
    """Return the value of the override that the remedy proposes after the words ``before``."""
    rules = dataclasses.replace(RULES, free_form=keys_of_type(dict))
    (problem,) = rules.check([override]).problems
    (proposed,) = shlex.split(problem.remedy.rpartition(before)[2].partition("; for one value")[0])
    (accepted,) = rules.check([proposed]).accepted
    return OverridesParser.create().parse_override(accepted).value()


class TestConfigFiles:
    def test_missing_folder_is_named(self, tmp_path: Path) -> None:
        error = rejection(folder=tmp_path / "config")
        assert error.keys == ("--config-path", "--config-dir") and CONFIG_NAME in error.remedy

    @pytest.mark.parametrize("name", ["gkd_trainer", "gkd_trainer.yaml"])
    def test_name_of_verls_file_is_answered(self, name: str) -> None:
        error = rejection(name=name)
        assert error.keys == ("--config-name",) and "of verl's gkd" in error.remedy

    def test_value_is_shown_once(self) -> None:
        assert str(rejection(*REQUIRED, "trainer.save_before=10m")).count("'10m'") == 1


class TestReferenceCommand:
    def test_help_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            print_keys(["--help"])
        assert caught.value.code == 0
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
