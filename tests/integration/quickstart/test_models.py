from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe_gkd.addition.task import Problem, endless_batches, make_splits
from recipe_gkd.addition.tokenizer import MAX_LENGTH, VOCAB_SIZE, build_tokenizer
from recipe_gkd.errors import ModelError
from recipe_gkd.quickstart import models
from recipe_gkd.quickstart.models import (
    FAMILY_RECIPES,
    RECIPES,
    SELF_RECIPES,
    Role,
    build_model,
    encode,
    greedy_accuracy,
    select_recipes,
    train_into_band,
)
from tests._support.errors import raises

PROBLEMS = make_splits(0, n_train=300, n_held_out=1, n_dev=1).train


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_tokenizer_has_one_token_per_character_and_round_trips(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    for problem in PROBLEMS:
        text = problem.question + problem.answer
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_keeps_unknown_characters(tokenizer: Any) -> None:
    assert tokenizer("1x \n")["input_ids"].count(tokenizer.unk_token_id) == 3


def test_chat_template_is_saved_and_loaded(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path)
    problem = Problem(123, 456)
    prompt = loaded.apply_chat_template(problem.messages(), add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>123+456=<|assistant|>"
    ids = loaded.apply_chat_template(problem.messages(), add_generation_prompt=True, return_dict=False)
    assert len(ids) == 10
    assert ids == tokenizer(prompt)["input_ids"]
    assert loaded.decode(ids, skip_special_tokens=True) == problem.question
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_conversations_are_prompt_answer_end_of_one_length(tokenizer: Any) -> None:
    ids_RS, prompt_length = encode(tokenizer, PROBLEMS)
    assert ids_RS.shape == (len(PROBLEMS), 42)
    assert ids_RS.shape[1] <= MAX_LENGTH
    assert set(ids_RS[:, -1].tolist()) == {tokenizer.eos_token_id}
    assert set(ids_RS[:, prompt_length - 1].tolist()) == {tokenizer.convert_tokens_to_ids("<|assistant|>")}


def test_solution_moves_the_question_and_changes_nothing_after_it(tokenizer: Any) -> None:
    plain_RS, _ = encode(tokenizer, PROBLEMS)
    solved_RS, prompt_length = encode(tokenizer, PROBLEMS, with_solution=True)
    assert (solved_RS.shape[1], prompt_length) == (74, 42) and solved_RS.shape[1] <= MAX_LENGTH
    assert torch.equal(solved_RS[:, 33:], plain_RS[:, 1:])
    assert torch.equal(solved_RS[:, 1:32], solved_RS[:, 42:73])


@pytest.mark.parametrize("role", [*RECIPES, *SELF_RECIPES, *FAMILY_RECIPES])
def test_recipes_suit_two_ranks_and_cpu_attention(role: Role) -> None:
    recipe = (RECIPES | SELF_RECIPES | FAMILY_RECIPES)[role]
    assert recipe.heads % 2 == recipe.kv_heads % 2 == recipe.layers % 2 == recipe.hidden % 4 == recipe.ffn % 4 == 0
    assert recipe.hidden // recipe.heads == 32


def test_saved_models_load_with_transformers(prepared: Path, tokenizer: Any) -> None:
    sizes = []
    for role, recipe in RECIPES.items():
        model = AutoModelForCausalLM.from_pretrained(prepared / role)
        sizes.append(model.num_parameters())
        assert model.dtype == torch.float32
        assert model.config.model_type == "qwen2"
        assert model.config.tie_word_embeddings == recipe.tied_embeddings
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert AutoTokenizer.from_pretrained(prepared / role).get_vocab() == tokenizer.get_vocab()
    assert sizes[0] > sizes[1]
    assert RECIPES["teacher"].kv_heads < RECIPES["teacher"].heads


def test_students_of_other_families_have_experts_and_a_gated_delta_net(tokenizer: Any) -> None:
    assert set(select_recipes(family="qwen3_moe")) == {"teacher", "qwen3_moe"}
    for role, recipe in FAMILY_RECIPES.items():
        model: Any = build_model(recipe, tokenizer, seed=0)
        assert model.config.model_type == role
        sizes = [model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers]
        assert sizes == [VOCAB_SIZE, RECIPES["student"].hidden, RECIPES["student"].layers]
        assert model.config.num_experts_per_tok < model.config.num_experts
        kinds = [hasattr(layer, "linear_attn") for layer in model.model.layers]
        assert kinds == ([True, False] if role == "qwen3_next" else [False, False])


def test_train_into_band_above_the_band_goes_back(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(RECIPES["student"], steps_between_evaluations=4, max_steps=50)
    model = build_model(recipe, tokenizer, seed=0)
    measured = iter([0.0, 0.9, 0.0, 0.2])
    weights: list[torch.Tensor] = []

    def accuracy(*_: object) -> float:
        weights.append(model.lm_head.weight.detach().clone())
        return next(measured)

    monkeypatch.setattr(models, "greedy_accuracy", accuracy)
    result = train_into_band(model, tokenizer, recipe, endless_batches(0, 4, []), PROBLEMS[:4], report=lambda _: None)
    assert result.accuracy == 0.2
    assert result.steps == 4 + 2 + 2
    jump, after_going_back = (weights[1] - weights[0]).norm(), (weights[2] - weights[0]).norm()
    assert 0 < after_going_back < jump


def test_train_into_band_with_solutions_waits_until_they_are_copied(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = dataclasses.replace(SELF_RECIPES["self_student"], steps_between_evaluations=1, max_steps=50)
    measured = {False: iter([0.0, 0.2, 0.2]), True: iter([0.98, 0.99])}
    monkeypatch.setattr(models, "greedy_accuracy", lambda *_, with_solution=False: next(measured[with_solution]))
    model = build_model(recipe, tokenizer, seed=0)
    result = train_into_band(model, tokenizer, recipe, endless_batches(0, 4, []), PROBLEMS[:4], report=lambda _: None)
    assert (result.accuracy, result.steps) == (0.2, 3)


def test_train_into_band_outside_after_max_steps_raises(tokenizer: Any) -> None:
    recipe = dataclasses.replace(RECIPES["student"], steps_between_evaluations=1, max_steps=2)
    model = build_model(recipe, tokenizer, seed=0)
    with raises(ModelError, path=None):
        train_into_band(model, tokenizer, recipe, endless_batches(0, 4, []), PROBLEMS[:4], report=lambda _: None)


def test_greedy_accuracy_agrees_with_generate(tokenizer: Any) -> None:
    """The model has memorized four of twelve problems."""
    known, unknown = PROBLEMS[:4], PROBLEMS[4:12]
    recipe = dataclasses.replace(RECIPES["student"], band=(1.0, 1.0), steps_between_evaluations=25, settle_from=1.0)
    model: Any = build_model(recipe, tokenizer, seed=0)
    train_into_band(model, tokenizer, recipe, iter(lambda: known, None), known, report=lambda _: None)
    problems = known + unknown
    ids_RS, prompt_length = encode(tokenizer, problems)
    out = model.generate(ids_RS[:, :prompt_length], max_new_tokens=32, do_sample=False)
    texts = tokenizer.batch_decode(out[:, prompt_length:], skip_special_tokens=True)
    exact = [text[-4:] == p.answer[-4:] and len(text) == 31 for text, p in zip(texts, problems, strict=True)]
    assert exact[:4] == [True] * 4
    assert greedy_accuracy(model, tokenizer, problems) == sum(exact) / len(exact) < 1
