from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe_gkd.errors import DataError, ModelError
from recipe_gkd.quickstart.evaluate import greedy_answers, main, read_problems, score, show
from recipe_gkd.quickstart.task import Problem, write_parquet


@pytest.mark.timeout(180)
def test_answers_of_both_models_are_those_of_transformers(prepared: Path, tmp_path: Path) -> None:
    data = prepared / "data" / "held_out.parquet"
    command = [sys.executable, "-m", "recipe_gkd.quickstart.evaluate", "--data", str(data), "--limit", "8"]
    for role in ("teacher", "student"):
        command += ["--model", str(prepared / role), "--json", str(tmp_path / f"{role}.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "0 of 8 answers exact" in done.stdout
    for role in ("teacher", "student"):
        evaluation = json.loads((tmp_path / f"{role}.json").read_text())
        assert (evaluation["n"], evaluation["n_exact"], evaluation["accuracy"]) == (8, 0, 0.0)
        model: Any = AutoModelForCausalLM.from_pretrained(prepared / role)
        tokenizer: Any = AutoTokenizer.from_pretrained(prepared / role)
        for row, example in zip(read_problems(data, 5), evaluation["examples"], strict=True):
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")
            out = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            ended = out[-1] == tokenizer.eos_token_id
            assert example["answer"] == tokenizer.decode(out, skip_special_tokens=True) + ("" if ended else "...")


def test_score_counts_and_shows(tmp_path: Path) -> None:
    problems = [Problem(123, 456), Problem(500, 500)]
    write_parquet(problems, tmp_path / "a.parquet")
    rows = read_problems(tmp_path / "a.parquet", None)
    evaluation = score(rows, [problems[0].answer, problems[1].answer + "..."], model="m", data="d", seconds=1.0)
    assert (evaluation.n, evaluation.n_exact, evaluation.accuracy) == (2, 1, 0.5)
    assert "1 of 2 answers exact (50.0%)" in show(evaluation)
    assert "wrong, expected 1000" in show(evaluation)


def test_missing_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"nowhere\.parquet"):
        read_problems(tmp_path / "nowhere.parquet", None)
    with pytest.raises(ModelError, match="not a Hugging Face model folder"):
        greedy_answers(tmp_path, [])
    assert main(["--model", str(tmp_path), "--data", str(tmp_path / "nowhere.parquet")]) == 1
    assert "recipe_gkd.quickstart.prepare" in capsys.readouterr().err
