"""Tests of sampling parameters, seeds and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from recipe_gkd.errors import ModelError
from recipe_gkd.rollout.sampling import SamplingName, request_seed, sampling_from, stop_token_ids
from tests._support.errors import raises
from tests._support.rollout_models import config_for


def folder_with(tmp_path: Path, **files: object) -> Path:
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return tmp_path


class TestRequestSeed:
    def test_request_seed_is_stable_and_depends_on_every_argument(self) -> None:
        assert request_seed(1, 2, 3) == 6520558355739401531
        seeds = {request_seed(seed, uid, step) for seed in range(10) for uid in range(10) for step in range(10)}
        assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
        assert request_seed(0, 10**9, 10**6) != request_seed(0, 10**6, 10**9)


class TestStopTokenIds:
    def test_stop_token_ids_joins_all_files(self, tmp_path: Path) -> None:
        assert stop_token_ids(str(folder_with(tmp_path))) == ()
        folder_with(tmp_path, config={"eos_token_id": 7, "text_config": {"eos_token_id": [9]}})
        assert stop_token_ids(str(tmp_path)) == (7, 9)
        folder_with(tmp_path, generation_config={"eos_token_id": [7, 3]})
        assert stop_token_ids(str(tmp_path)) == (3, 7, 9)
        folder_with(tmp_path, config={"eos_token_id": None}, generation_config={"eos_token_id": 0})
        assert stop_token_ids(str(tmp_path)) == (0,)
        (tmp_path / "config.json").write_text("{")
        with raises(ModelError, path=tmp_path / "config.json"):
            stop_token_ids(str(tmp_path))

    @pytest.mark.parametrize("value", ["</s>", [1, "</s>"], True, -1])
    def test_stop_token_ids_invalid_value_raises(self, tmp_path: Path, value: object) -> None:
        folder_with(tmp_path, config={"eos_token_id": value})
        with raises(ModelError, path=tmp_path, names=("eos_token_id",)):
            stop_token_ids(str(tmp_path))


class TestSampling:
    def test_sampling_from_reads_configuration(self, tmp_path: Path) -> None:
        folder_with(tmp_path, config={"eos_token_id": 7})
        keys = ["temperature=0.7", "top_p=0.9", "top_k=50"]
        config = config_for(tmp_path, *(f"actor_rollout_ref.rollout.{key}" for key in keys), "data.seed=5")
        assert sampling_from(config).for_request(uid=2, step=3) == {
            "temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_tokens": 48, "stop_token_ids": [7],
            "seed": request_seed(5, 2, 3), "logprobs": 0,
        }  # fmt: skip

    def test_sampling_from_adds_teacher_stop_ids(self, tmp_path: Path) -> None:
        folder_with(tmp_path, config={"eos_token_id": 7})
        assert sampling_from(config_for(tmp_path), also_stop_at=[9, 7, 3]).stop_token_ids == (3, 7, 9)

    def test_only_requests_whose_scores_are_read_return_student_ids(self, tmp_path: Path) -> None:
        folder_with(tmp_path, config={"eos_token_id": 7})
        teacher = "actor_rollout_ref.teacher"
        settings = {
            "teacher": {"train": 0, "validation": 0, "probe": 0},
            "student": {"train": 5, "validation": 0, "probe": 0},
            "union": {"train": 5, "validation": 5, "probe": 0},
        }
        for support, expected in settings.items():
            keys = [f"{teacher}.support={support}", f"trainer.val_kl={support == 'union'}"]
            validation = ["trainer.test_freq=1", "data.val_files=x", "custom_reward_function.path=reward.py"]
            config = config_for(tmp_path, *keys, f"{teacher}.student_top_k=5", *validation)
            found = {name: sampling_from(config, name).for_request(0, 0)["logprobs"] for name in get_args(SamplingName)}
            assert found == expected, support

    def test_for_request_greedy_has_no_seed(self, tmp_path: Path) -> None:
        folder_with(tmp_path, config={"eos_token_id": 7})
        greedy = {"temperature": 0.0, "max_tokens": 48, "stop_token_ids": [7], "logprobs": 0}
        assert sampling_from(config_for(tmp_path), "validation").for_request(uid=2, step=3) == greedy
        cold = config_for(tmp_path, "actor_rollout_ref.rollout.temperature=0")
        assert sampling_from(cold).for_request(uid=2, step=3) == greedy

    def test_for_request_validation_seeds_do_not_depend_on_step(self, tmp_path: Path) -> None:
        folder_with(tmp_path, config={"eos_token_id": 7})
        keys = [f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in ("temperature=0.6", "top_p=0.8", "top_k=20")]
        sampling = sampling_from(config_for(tmp_path, *keys), "validation", also_stop_at=[9])
        first, later = (sampling.for_request(uid=2, step=step) for step in (0, 40))
        assert first == later == {
            "temperature": 0.6, "top_p": 0.8, "top_k": 20, "max_tokens": 48, "stop_token_ids": [7, 9],
            "seed": first["seed"], "logprobs": 0,
        }  # fmt: skip
        assert first["seed"] not in {request_seed(0, 2, step) for step in range(1000)}
        assert sampling.for_request(uid=3, step=0)["seed"] != first["seed"]
