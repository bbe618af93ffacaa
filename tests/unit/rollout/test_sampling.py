"""What every request is asked for; nothing here needs an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe_gkd.errors import ModelError
from recipe_gkd.rollout.sampling import request_seed, sampling_from, stop_token_ids
from tests.integration.rollout.small_models import config_for


def folder_with(tmp_path: Path, **files: object) -> Path:
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return tmp_path


def test_seeds_are_reproducible_and_differ_in_every_argument() -> None:
    assert request_seed(1, 2, 3) == 6520558355739401531
    seeds = {request_seed(seed, uid, step) for seed in range(10) for uid in range(10) for step in range(10)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 10**9, 10**6) != request_seed(0, 10**6, 10**9)


def test_stop_tokens_are_those_of_all_files_of_the_model(tmp_path: Path) -> None:
    assert stop_token_ids(str(folder_with(tmp_path))) == ()
    folder_with(tmp_path, config={"eos_token_id": 7, "text_config": {"eos_token_id": [9]}})
    assert stop_token_ids(str(tmp_path)) == (7, 9)
    folder_with(tmp_path, generation_config={"eos_token_id": [7, 3]})
    assert stop_token_ids(str(tmp_path)) == (3, 7, 9)
    folder_with(tmp_path, config={"eos_token_id": None}, generation_config={"eos_token_id": 0})
    assert stop_token_ids(str(tmp_path)) == (0,)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        stop_token_ids(str(tmp_path))


def test_parameters_come_from_the_configuration(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"eos_token_id": 7})
    keys = ["temperature=0.7", "top_p=0.9", "top_k=50"]
    config = config_for(tmp_path, *(f"actor_rollout_ref.rollout.{key}" for key in keys), "data.seed=5")
    assert sampling_from(config).for_request(uid=2, step=3) == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_tokens": 48, "stop_token_ids": [7],
        "seed": request_seed(5, 2, 3),
    }  # fmt: skip


def test_answers_end_at_the_students_ids_and_at_those_that_are_given(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"eos_token_id": 7})
    assert sampling_from(config_for(tmp_path), also_stop_at=[9, 7, 3]).stop_token_ids == (3, 7, 9)


def test_greedy_needs_no_seed_and_validation_is_greedy_by_default(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"eos_token_id": 7})
    greedy = {"temperature": 0.0, "max_tokens": 48, "stop_token_ids": [7]}
    assert sampling_from(config_for(tmp_path), "validation").for_request(uid=2, step=3) == greedy
    cold = config_for(tmp_path, "actor_rollout_ref.rollout.temperature=0")
    assert sampling_from(cold).for_request(uid=2, step=3) == greedy


def test_sampled_validation_has_parameters_of_its_own_and_the_same_seeds_at_every_step(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"eos_token_id": 7})
    keys = [f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in ("temperature=0.6", "top_p=0.8", "top_k=20")]
    sampling = sampling_from(config_for(tmp_path, *keys), "validation", also_stop_at=[9])
    first, later = (sampling.for_request(uid=2, step=step) for step in (0, 40))
    assert first == later == {
        "temperature": 0.6, "top_p": 0.8, "top_k": 20, "max_tokens": 48, "stop_token_ids": [7, 9],
        "seed": first["seed"],
    }  # fmt: skip
    assert first["seed"] not in {request_seed(0, 2, step) for step in range(1000)}
    assert sampling.for_request(uid=3, step=0)["seed"] != first["seed"]
