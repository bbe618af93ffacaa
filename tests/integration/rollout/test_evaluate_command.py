"""The command ``evaluate`` with vLLM: responses of transformers, rewards of the function, several models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from recipe_gkd.addition.task import make_splits, write_parquet
from recipe_gkd.commands.gpu_smoke.tiny_models import read_model, write_model
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

N_PROMPTS, MAX_TOKENS = 6, 12
REWARD = """
def length(prompt, response, ground_truth, extra):
    assert ground_truth and prompt[-1]["role"] == "user"
    return len(response) / 10
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models ``a`` and ``b``, prompts and a reward function."""
    folder = tmp_path_factory.mktemp("evaluate")
    for seed, name in enumerate("ab"):
        write_model(folder / name, seed=seed, with_tokenizer=True)
    write_parquet(make_splits(0, n_train=N_PROMPTS, n_held_out=2, n_dev=2).train, folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def evaluate(folder: Path, *arguments: str) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Run the command. Return its output, its results, and all responses."""
    out, responses = folder / "out.json", folder / "responses.jsonl"
    command = [
        sys.executable, "-m", "recipe_gkd", "evaluate", str(folder / "a"), str(folder / "b"),
        "--data", str(folder / "data.parquet"), "--reward", f"{folder / 'reward.py'}:length", "--dtype", "float32",
        "--cpu-cache-gb", "0.05", "--json", str(out), "--responses", str(responses),
        "data.ground_truth_key=answer", f"data.max_response_length={MAX_TOKENS}", *arguments,
    ]  # fmt: skip
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(out.read_text()), [json.loads(line) for line in responses.read_text().splitlines()]


def greedy_of_transformers(folder: Path, prompt: list[dict[str, str]]) -> str:
    """Return the greedy response of transformers to a chat."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    model = read_model(folder, torch.float32)
    found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=MAX_TOKENS)
    return str(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))


def test_greedy_responses_and_rewards(folder: Path) -> None:
    printed, results, responses = evaluate(folder)
    assert len(responses) == 2 * N_PROMPTS
    for one in responses[:2] + responses[-2:]:
        assert one["response"] == greedy_of_transformers(Path(one["model"]), one["prompt"])
        assert one["reward"] == pytest.approx(len(one["response"]) / 10)
    for number, model in enumerate(results["models"]):
        own = [one["reward"] for one in responses[number * N_PROMPTS : (number + 1) * N_PROMPTS]]
        [score] = model["scores"].values()
        assert score["mean"] == pytest.approx(sum(own) / N_PROMPTS) and score["n_prompts"] == N_PROMPTS
    means = [next(iter(model["scores"].values()))["mean"] for model in results["models"]]
    assert results["models"][1]["difference"]["mean"] == pytest.approx(means[1] - means[0])
    assert "mean reward, greedy" in printed and "difference to a" in printed


def test_padding_of_the_output_layer_is_not_sampled(folder: Path) -> None:
    """Padding ids have no text, so a response of them loses its reward without a sign."""
    padded = folder / "padded"
    shutil.copytree(folder / "a", padded)
    config = json.loads((padded / "config.json").read_text())
    weights = load_file(padded / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([rows, 30 * rows])
    (padded / "config.json").write_text(json.dumps(config | {"vocab_size": 2 * len(rows)}))
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    _, _, responses = evaluate(folder, str(padded), "--n", "2")
    texts = {name: [one["response"] for one in responses if one["model"].endswith(name)] for name in ("/a", "/padded")}
    assert texts["/a"] == texts["/padded"] != []


def test_several_responses_differ_and_repeat_with_the_seed(folder: Path) -> None:
    printed, results, responses = evaluate(folder, "--n", "4")
    assert len(responses) == 2 * N_PROMPTS * 4 and "avg@4" in printed and "best@4" in printed
    assert len({one["response"] for one in responses[:4]}) > 1
    [score] = results["models"][0]["scores"].values()
    assert score["best"] > score["mean"] and score["mean_error"] > 0
    assert evaluate(folder, "--n", "4")[2] == responses
