from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe_gkd.quickstart.evaluate import read_problems
from recipe_gkd.quickstart.models import RECIPES
from recipe_gkd.quickstart.prepare import prepare


@pytest.mark.slow  # launch/quickstart.sh runs the command too.
@pytest.mark.timeout(180)
def test_evaluate_command_generates_the_responses_of_transformers(tmp_path: Path) -> None:
    """The command evaluates two untrained models in one process."""
    recipes = {
        role: dataclasses.replace(recipe, band=(0.0, 1.0), steps_between_evaluations=1, max_steps=1)
        for role, recipe in RECIPES.items()
    }
    prepare(tmp_path, seed=3, recipes=recipes, timeout_s=120)
    data = tmp_path / "data" / "held_out.parquet"
    command = [sys.executable, "-m", "recipe_gkd.quickstart.evaluate", "--data", str(data), "--limit", "8"]
    for role in RECIPES:
        command += ["--model", str(tmp_path / role), "--json", str(tmp_path / f"{role}.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "0 of 8 answers exact" in done.stdout
    for role in RECIPES:
        evaluation = json.loads((tmp_path / f"{role}.json").read_text())
        assert (evaluation["n"], evaluation["n_exact"], evaluation["accuracy"]) == (8, 0, 0.0)
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / role)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / role)
        for row, example in zip(read_problems(data, 5), evaluation["examples"], strict=True):
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")
            out = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            ended = out[-1] == tokenizer.eos_token_id
            assert example["answer"] == tokenizer.decode(out, skip_special_tokens=True) + ("" if ended else "...")
