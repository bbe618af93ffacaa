"""Training of the quickstart models from random weights, with PyTorch and transformers.

Teacher and student have the Qwen2 architecture; :data:`FAMILY_RECIPES` has students of other families. The teacher is
trained until it solves the task. The training of a smaller student is stopped within a band of accuracy. Below the band
the distillation would have nothing to build on, and above it the improvement would not be visible. The step at which
the accuracy rises depends on the seed and on the machine's rounding. Therefore small greedy evaluations decide when to
stop (:func:`train_into_band`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from recipe_gkd.addition.task import ALPHABET, Problem, endless_batches, is_exact
from recipe_gkd.addition.tokenizer import MAX_LENGTH, build_tokenizer
from recipe_gkd.errors import ModelError

Role = Literal["teacher", "student", "self_student", "qwen3_moe", "qwen3_next"]
WARMUP_STEPS = 20
BATCH_SIZE = 64
STEPS_BETWEEN_LINES = 20
MIN_COPIED = 0.99
"""Minimum fraction of exact answers of a model that reads the solution in its prompt."""
ROPE = {"rope_type": "default", "rope_theta": 100.0}
"""Rotary embedding. Attention spans at most a few dozen tokens. With the usual base of 10000, copying is learned more
slowly."""
ERROR_RATE = 0.1
"""Fraction of the response tokens that are replaced by random ones in the input of a prompt with a solution."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shape and training of one model.

    Attributes:
        layers: Number of transformer layers.
        hidden: Hidden size.
        heads: Number of attention heads.
        kv_heads: Number of key-value heads.
        ffn: Hidden size of the MLP.
        tied_embeddings: True if the output layer shares the embedding's weights.
        lr: Initial learning rate.
        band: Fraction of exact answers on the dev split at which the training ends. Above it, the training goes back.
        settle_from: From this accuracy on, the learning rate is reduced after each evaluation.
        settle_factor: Factor of that reduction.
        min_lr: Lower bound of the reduced learning rate.
        steps_between_evaluations: Steps between two evaluations.
        max_steps: Maximum number of steps.
        with_solutions: True to train on each problem a second time, with its solution before the question and errors in
            the response so far (:data:`ERROR_RATE`), so that the model continues with the solution after an error. The
            training ends only when the model also copies at least :data:`MIN_COPIED` of the solutions.
        model_type: ``model_type`` of the family in transformers.
        options: Options of the family's configuration, beside the common ones.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    tied_embeddings: bool
    lr: float
    band: tuple[float, float]
    settle_from: float
    settle_factor: float
    min_lr: float
    steps_between_evaluations: int
    max_steps: int
    with_solutions: bool = False
    model_type: str = "qwen2"
    options: Mapping[str, Any] = field(default_factory=dict)


# 32 is the smallest head size of vLLM's CPU attention. Two key-value heads allow two tensor-parallel ranks.
RECIPES: dict[Role, Recipe] = {
    "teacher": Recipe(
        layers=2, hidden=128, heads=4, kv_heads=2, ffn=512, tied_embeddings=False,
        lr=2e-3, band=(0.99, 1.0), settle_from=0.3, settle_factor=0.8, min_lr=1e-4,
        steps_between_evaluations=20, max_steps=3000,
    ),
    "student": Recipe(
        layers=2, hidden=64, heads=2, kv_heads=2, ffn=256, tied_embeddings=True,
        lr=2e-3, band=(0.16, 0.28), settle_from=0.02, settle_factor=0.9, min_lr=3e-4,
        steps_between_evaluations=5, max_steps=3000,
    ),
}  # fmt: skip
SELF_RECIPES: dict[Role, Recipe] = {"self_student": dataclasses.replace(RECIPES["student"], with_solutions=True)}
"""Model of ``launch/quickstart.sh --self``, which solves as few problems as the student, and copies given solutions."""
FAMILY_RECIPES: dict[Role, Recipe] = {
    "qwen3_moe": dataclasses.replace(
        RECIPES["student"],
        model_type="qwen3_moe",
        options=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True),
    ),
    "qwen3_next": dataclasses.replace(
        RECIPES["student"],
        model_type="qwen3_next",
        tied_embeddings=False,
        options=dict(
            layer_types=["linear_attention", "full_attention"],
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128,
            norm_topk_prob=True,
            rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
        ),
    ),
}  # fmt: skip
"""Students of ``launch/quickstart.sh --family``: a mixture of experts, and a gated delta net with attention."""


def select_recipes(*, for_self: bool = False, family: Role | None = None) -> dict[Role, Recipe]:
    """Return the recipes of the models of a quickstart: by default the teacher and the dense student.

    Args:
        for_self: True for the model of a self-distillation.
        family: Student of :data:`FAMILY_RECIPES` instead of the dense one.
    """
    if for_self:
        return SELF_RECIPES
    return RECIPES if family is None else {"teacher": RECIPES["teacher"], family: FAMILY_RECIPES[family]}


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Result of the training of one model.

    Attributes:
        accuracy: Fraction of exact greedy answers on the dev split.
        steps: Number of steps, without those that were taken back.
        parameters: Number of parameters.
    """

    accuracy: float
    steps: int
    parameters: int


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return an untrained fp32 model."""
    torch.manual_seed(seed)
    options: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters=ROPE,
        tie_word_embeddings=recipe.tied_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    config = AutoConfig.for_model(recipe.model_type, **(options | dict(recipe.options)))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def encode(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem], *, with_solution: bool = False
) -> tuple[torch.Tensor, int]:
    """Tokenize whole conversations.

    Args:
        problems: Problems with their answers.
        with_solution: True for prompts that contain the solution.

    Returns:
        Token ids, int64 [R, S], and the length of the prompt, which is the same in every row.
    """
    prompts = [problem.messages(with_solution=with_solution) for problem in problems]
    answers = [{"role": "assistant", "content": problem.answer} for problem in problems]
    chats = [[*prompt, answer] for prompt, answer in zip(prompts, answers, strict=True)]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    ids_RS = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    prompt = tokenizer.apply_chat_template(prompts[0], tokenize=False, add_generation_prompt=True)
    return ids_RS, len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


class Conversations(NamedTuple):
    """Tokenized conversations of a training step.

    Attributes:
        ids_RS: Token ids, int64.
        prompt_length: Length of the prompt, which is the same in every row.
        error_ids: Token ids of the errors in the answers so far, int64 [X]. None: no errors.
    """

    ids_RS: torch.Tensor
    prompt_length: int
    error_ids: torch.Tensor | None = None


@torch.no_grad()
def greedy_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], *, with_solution: bool = False
) -> float:
    """Return the fraction of exact answers under greedy decoding. All problems are decoded in one batch.

    Args:
        with_solution: True for prompts that contain the solution.
    """
    ids_RS, prompt_length = encode(tokenizer, problems, with_solution=with_solution)
    step_ids, cache, columns = ids_RS[:, :prompt_length], None, []
    for _ in range(ids_RS.shape[1] - prompt_length):
        out = model(input_ids=step_ids, past_key_values=cache, use_cache=True)
        cache, step_ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        columns.append(step_ids)
    texts = tokenizer.batch_decode(torch.cat(columns, 1), skip_special_tokens=False)
    # Correct answers have the same length, so a correct one ends with the EOS token in the last column.
    eos = tokenizer.eos_token
    exact = [t.endswith(eos) and is_exact(t.removesuffix(eos), p.answer) for t, p in zip(texts, problems, strict=True)]
    return sum(exact) / len(exact)


def train_into_band(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    batches: Iterator[list[Problem]],
    dev: list[Problem],
    report: Callable[[str], None],
) -> TrainingResult:
    """Train with cross-entropy until the accuracy on the dev problems is in the band of the recipe.

    If an evaluation is above the band, model and optimizer return to the previous evaluation. The training continues
    with half the learning rate and half the steps between evaluations.

    Args:
        model: Model, trained in place.
        recipe: Optimizer settings and band.
        dev: Problems of the evaluations.
        report: Function that prints a line of progress.

    Raises:
        ModelError: The accuracy is not in the band after ``recipe.max_steps`` steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    lr, interval = recipe.lr, recipe.steps_between_evaluations
    lowest, highest = recipe.band
    accuracy, steps, n_reverted_steps = 0.0, 0, 0
    snapshot = _snapshot(model, optimizer)
    error_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(ALPHABET)))
    while steps < recipe.max_steps:
        for _ in range(interval):
            steps += 1
            problems = next(batches)
            batch = [Conversations(*encode(tokenizer, problems))]
            if recipe.with_solutions:
                batch.append(Conversations(*encode(tokenizer, problems, with_solution=True), error_ids))
            loss = _train_step(model, optimizer, batch, lr * min(1.0, steps / WARMUP_STEPS))
        accuracy = greedy_accuracy(model, tokenizer, dev)
        if steps % STEPS_BETWEEN_LINES == 0 or accuracy >= lowest:
            report(f"step {steps:4d}  loss {loss:.3f}  exact answers {accuracy:6.1%}  lr {lr:.1e}")
        if lowest <= accuracy <= highest and _copies(model, tokenizer, recipe, dev, report):
            parameters = sum(p.numel() for p in model.parameters())
            return TrainingResult(accuracy=accuracy, steps=steps - n_reverted_steps, parameters=parameters)
        if accuracy > highest:
            _restore(model, optimizer, snapshot)
            n_reverted_steps += interval
            report(f"above {highest:.0%}: back by {interval} steps, continue with half the learning rate")
            lr, interval = lr / 2, max(1, interval // 2)
            continue
        if accuracy >= recipe.settle_from:
            lr = max(recipe.min_lr, lr * recipe.settle_factor)
        snapshot = _snapshot(model, optimizer)
    raise ModelError(
        f"got {accuracy:.1%} exact answers after {steps} steps, expected {lowest:.0%} to {highest:.0%}",
        remedy="use another --seed, and report this if it happens again",
    )


def _copies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    dev: list[Problem],
    report: Callable[[str], None],
) -> bool:
    """Return True if the model answers exactly with the solution in its prompt, or if the recipe does not need it."""
    if not recipe.with_solutions:
        return True
    accuracy = greedy_accuracy(model, tokenizer, dev, with_solution=True)
    report(f"exact answers with the solution in the prompt {accuracy:6.1%}")
    return accuracy >= MIN_COPIED


def make_model(
    role: Role,
    recipe: Recipe,
    *,
    seed: int,
    dev: list[Problem],
    excluded: list[Problem],
    folder: Path,
    report: Callable[[str], None],
) -> TrainingResult:
    """Build, train and save one model with its tokenizer, as a Hugging Face folder.

    Teacher and student have different initial weights and training problems.

    Args:
        role: Teacher or student.
        recipe: Shape and training of the model.
        seed: Seed of the quickstart.
        dev: Problems of the evaluations.
        excluded: Problems that must not be trained on.
        folder: Output folder.
        report: Function that prints a line of progress.

    Raises:
        ModelError: The accuracy is not in the band after ``recipe.max_steps`` steps.
    """
    seed = 2 * seed + (role != "teacher")
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer, seed)
    result = train_into_band(model, tokenizer, recipe, endless_batches(seed, BATCH_SIZE, excluded), dev, report)
    save_model(model, tokenizer, folder)
    return result


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder with the model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: list[Conversations], lr: float
) -> float:
    """Update the model on conversations of several kinds, each with the same weight. Return the loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = torch.stack([_answer_loss(model, conversations) for conversations in batch]).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _answer_loss(model: PreTrainedModel, conversations: Conversations) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens. The question is random and cannot be learned."""
    ids_RS, prompt_length, error_ids = conversations
    inputs_RS = ids_RS[:, :-1]
    if error_ids is not None:
        inputs_RS = inputs_RS.clone()
        responses_RT = inputs_RS[:, prompt_length:]
        errors_RT = error_ids[torch.randint(len(error_ids), responses_RT.shape)]
        responses_RT[:] = torch.where(torch.rand(responses_RT.shape) < ERROR_RATE, errors_RT, responses_RT)
    logits_RTV = model(input_ids=inputs_RS, use_cache=False).logits[:, prompt_length - 1 :]
    return F.cross_entropy(logits_RTV.flatten(0, 1), ids_RS[:, prompt_length:].flatten())


Snapshot = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _snapshot(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Snapshot:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def _restore(model: PreTrainedModel, optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    model.load_state_dict(snapshot[0])
    # The optimizer would take over the tensors of the snapshot and change them.
    optimizer.load_state_dict(copy.deepcopy(snapshot[1]))
