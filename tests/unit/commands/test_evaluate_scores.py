"""Statistics and arguments of the command ``evaluate``, without an engine."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.commands.evaluate.command import _parser, build_config, main, sampling_of
from recipe_gkd.commands.evaluate.scores import Evaluation, as_json, difference, mean_and_error, render, scores_of
from recipe_gkd.commands.model_folder import model_folder
from recipe_gkd.errors import CheckpointError, ConfigError, ModelError
from recipe_gkd.rollout.offline_engine import limit_to_model
from tests._support.errors import raises


def make_evaluation(rewards_PN: list[list[float]] | None, model: str = "m", sources: str = "aabb") -> Evaluation:
    shape = np.shape(rewards_PN) if rewards_PN is not None else (len(sources), 1)
    return Evaluation(
        model=model,
        sources=list(sources[: shape[0]]),
        rows=list(range(shape[0])),
        rewards_PN=None if rewards_PN is None else np.array(rewards_PN),
        lengths_PN=np.full(shape, 10.0),
        truncated_PN=np.eye(*shape),
        seconds=1.0,
    )


def make_model(folder: Path, **config: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class TestScores:
    def test_mean_best_and_errors_are_over_prompts(self) -> None:
        scores = scores_of(make_evaluation([[0, 1], [1, 1], [0, 0], [0, 1]]))
        assert set(scores) == {"a", "b", "all"}
        whole = scores["all"]
        assert (whole.n_prompts, whole.mean, whole.best) == (4, 0.5, 0.75)
        assert whole.mean_error == pytest.approx(np.std([0.5, 1, 0, 0.5], ddof=1) / 2)
        assert scores["a"].mean == 0.75 and whole.truncated_fraction == pytest.approx(2 / 8)

    def test_conversations_that_are_left_out_are_in_no_mean(self) -> None:
        evaluation = make_evaluation([[math.nan, 1], [1, 1]])
        evaluation.lengths_PN[0, 0] = evaluation.truncated_PN[0, 0] = math.nan
        score = scores_of(evaluation)["a"]
        assert (score.response_len, score.truncated_fraction, score.n_failed) == (10.0, pytest.approx(1 / 3), 1)
        evaluation.lengths_PN[:] = math.nan
        assert scores_of(evaluation)["a"].response_len == 0.0

    def test_table_has_rows_that_only_a_later_model_has(self) -> None:
        """The environment of a weak model may report fewer numbers, and all its calls of the reward may fail."""
        first = make_evaluation([[math.nan], [math.nan]], "base", sources="aa")
        other = replace(make_evaluation([[1.0], [1.0]], "trained", sources="aa"), numbers=[{"found": 1.0}] * 2)
        lines = render([first, other], 1).splitlines()
        assert [line.split()[-1] for line in lines if "found" in line] == ["1.0000"]
        assert any("mean reward, greedy" in line and "1.0000" in line for line in lines)

    def test_one_prompt_has_no_error(self) -> None:
        assert mean_and_error(np.array([0.5])) == (0.5, None)

    def test_one_source_has_no_second_row_for_all(self) -> None:
        assert list(scores_of(make_evaluation([[1], [0]]))) == ["a"]

    def test_difference_is_paired_by_prompt(self) -> None:
        first, other = make_evaluation([[0.0], [1.0], [0.5]]), make_evaluation([[0.5], [1.5], [1.0]])
        assert difference(first, other) == pytest.approx((0.5, 0.0))
        assert difference(first, make_evaluation([[0.0], [1.0]])) is None

    def test_responses_without_reward_are_left_out_and_counted(self) -> None:
        nan = float("nan")
        found = make_evaluation([[1.0, nan], [0.0, 0.5], [nan, nan]], sources="aaa")
        score = scores_of(found)["a"]
        assert (score.mean, score.best, score.n_failed) == (0.625, 0.5, 3)
        assert difference(make_evaluation([[0.0, 0.0]] * 3), found) == (0.25, None)
        assert re.search(r"responses without reward +3\n", render([found], 2))
        failed = scores_of(make_evaluation([[nan]]))["a"]
        assert (failed.mean, failed.best, failed.n_failed) == (None, None, 1)

    def test_table_compares_models_side_by_side(self) -> None:
        first = make_evaluation([[0.0], [1.0]], "runs/a/global_step_5/huggingface")
        table = render([first, make_evaluation([[1.0], [1.0]], "models/b")], 1).splitlines()
        assert table[0].split() == ["global_step_5", "b"]
        assert re.split(r"\s{2,}", table[2].strip()) == ["mean reward, greedy", "0.5000 ± 0.5000", "1.0000 ± 0.0000"]
        assert table[-1].startswith("difference to global_step_5") and "+0.5000" in table[-1]

    def test_without_reward_only_lengths_are_shown(self) -> None:
        table = render([make_evaluation(None)], 1)
        assert "response tokens" in table and "reward" not in table

    def test_json_has_scores_and_differences(self) -> None:
        result = as_json([make_evaluation([[0.0], [1.0]]), make_evaluation([[1.0], [1.0]], "n")], {"n": 1})
        assert result["n"] == 1 and result["models"][0]["scores"]["a"]["mean"] == 0.5
        assert result["models"][1]["difference"]["mean"] == 0.5
        json.dumps(result, allow_nan=False)


class TestArguments:
    def test_keys_and_options_may_be_in_any_order(self) -> None:
        args = _parser().parse_intermixed_args(["a", "--data", "d.parquet", "b", "data.prompt_key=q", "--n", "4"])
        assert args.folders == ["a", "b", "data.prompt_key=q"]
        config = build_config(args, ["data.prompt_key=q", "data.max_response_length=7"])
        assert config.data.prompt_key == "q" and list(config.data.val_files) == ["d.parquet"]
        sampling = sampling_of(args, config)
        assert (sampling.n, sampling.max_tokens, sampling.temperature) == (4, 7, 1.0)

    def test_reward_is_a_file_and_a_function(self) -> None:
        args = _parser().parse_args(["a", "--data", "d", "--reward", "x/r.py:score"])
        function = build_config(args, []).custom_reward_function
        assert (function.path, function.name) == ("x/r.py", "score")
        args.reward = "r.txt"
        with raises(ConfigError, keys=("--reward",)):
            build_config(args, [])

    def test_equal_responses_are_refused(self) -> None:
        args = _parser().parse_args(["a", "--data", "d", "--n", "4", "--temperature", "0"])
        with raises(ConfigError, keys=("--n", "--temperature")):
            sampling_of(args, build_config(args, []))

    def test_checkpoint_means_its_hugging_face_folder(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "global_step_3" / "huggingface")
        assert model_folder(tmp_path / "global_step_3") == folder == model_folder(folder)
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            model_folder(tmp_path)
        with raises(ModelError):
            model_folder(tmp_path / "other")

    def test_length_is_limited_by_the_model(self, tmp_path: Path) -> None:
        assert limit_to_model(100, make_model(tmp_path / "a", max_position_embeddings=64)) == 64
        assert limit_to_model(100, make_model(tmp_path / "b")) == 100

    def test_error_is_one_line_without_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data.prompt_key=q", "--data", "d"]) == 1
        assert capsys.readouterr().err.startswith("error: got no model")


def test_reward_without_a_name_is_the_default_function_of_a_training() -> None:
    def reward_of(spec: str) -> tuple[str | None, str]:
        args = _parser().parse_args(["model", "--data", "val.parquet", "--reward", spec])
        reward = build_config(args, []).custom_reward_function
        return reward.path, reward.name

    assert reward_of("reward.py") == ("reward.py", "compute_score")
    assert reward_of("reward.py:score") == ("reward.py", "score")
