"""The two models of the quickstart, trained here from nothing with plain PyTorch and transformers.

Both have the Qwen2 architecture. The teacher is trained until it solves the task. The student is smaller and is
stopped early, inside a band of accuracy: with nothing right it would have nothing to build on, and with too much there
would be nothing to watch. When the accuracy takes off is a matter of luck and of the machine's floating point, so no
number of steps is fixed: small greedy evaluations decide (`train_into_band`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from recipe_gkd.errors import ModelError
from recipe_gkd.quickstart.task import Problem, endless_batches, is_exact
from recipe_gkd.quickstart.tokenizer import MAX_LENGTH, build_tokenizer

Role = Literal["teacher", "student"]
WARMUP_STEPS = 20
BATCH_SIZE = 64
STEPS_BETWEEN_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model: its shape, and how it is trained."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    tied_embeddings: bool
    lr: float
    band: tuple[float, float]
    """Stop once the share of exact answers on the dev split is in here; above it, go back."""
    settle_from: float
    """From this accuracy on, each evaluation is followed by a lower learning rate."""
    settle_factor: float
    min_lr: float
    steps_between_evaluations: int
    max_steps: int


# Heads of 32 are the smallest that vLLM's CPU attention has; two key-value heads let two ranks share them.
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


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a model came out."""

    accuracy: float
    """Share of exact greedy answers on the dev split."""
    steps: int
    parameters: int


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """An untrained fp32 model."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=MAX_LENGTH,
        # Answers look back a few dozen tokens at most; the usual base of 10000 and more makes copying slower to learn.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=recipe.tied_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[torch.Tensor, int]:
    """Whole conversations, ids_BS int64, and P, the length of the prompt, which is the same in every row."""
    chats = [[*p.messages(), {"role": "assistant", "content": p.answer}] for p in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    ids_BS = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    prompt = tokenizer.apply_chat_template(problems[0].messages(), tokenize=False, add_generation_prompt=True)
    return ids_BS, len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def greedy_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> float:
    """Share of exact answers under greedy decoding, all problems in one batch with a key-value cache."""
    ids_BS, prompt_length = encode(tokenizer, problems)
    step_ids, cache, columns = ids_BS[:, :prompt_length], None, []
    for _ in range(ids_BS.shape[1] - prompt_length):
        out = model(input_ids=step_ids, past_key_values=cache, use_cache=True)
        cache, step_ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        columns.append(step_ids)
    texts = tokenizer.batch_decode(torch.cat(columns, 1), skip_special_tokens=False)
    # Right answers have one length, so one that is right ends in the last column with the end token.
    end = tokenizer.eos_token
    right = [t.endswith(end) and is_exact(t.removesuffix(end), p.answer) for t, p in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


def train_into_band(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    batches: Iterator[list[Problem]],
    dev: list[Problem],
    say: Callable[[str], None],
) -> Made:
    """Supervised training until the accuracy on `dev` lies in `recipe.band`.

    If an evaluation finds it above the band, model and optimizer return to the evaluation before, and go on with half
    the learning rate and half the steps until the next evaluation.

    Raises ModelError after `recipe.max_steps` steps outside the band.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    peak_lr, every = recipe.lr, recipe.steps_between_evaluations
    lowest, highest = recipe.band
    accuracy, steps, steps_taken_back = 0.0, 0, 0
    kept = _snapshot(model, optimizer)
    while steps < recipe.max_steps:
        for _ in range(every):
            steps += 1
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * min(1.0, steps / WARMUP_STEPS)
            loss = _answer_loss(model, *encode(tokenizer, next(batches)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accuracy = greedy_accuracy(model, tokenizer, dev)
        if steps % STEPS_BETWEEN_LINES == 0 or accuracy >= lowest:
            say(f"step {steps:4d}  loss {loss.item():.3f}  exact answers {accuracy:6.1%}  lr {peak_lr:.1e}")
        if lowest <= accuracy <= highest:
            parameters = sum(p.numel() for p in model.parameters())
            return Made(accuracy=accuracy, steps=steps - steps_taken_back, parameters=parameters)
        if accuracy > highest:
            _restore(model, optimizer, kept)
            steps_taken_back, steps_back = steps_taken_back + every, every
            peak_lr, every = peak_lr / 2, max(1, every // 2)
            say(f"above {highest:.0%}: back by {steps_back} steps, on with {every} at a time")
            continue
        if accuracy >= recipe.settle_from:
            peak_lr = max(recipe.min_lr, peak_lr * recipe.settle_factor)
        kept = _snapshot(model, optimizer)
    raise ModelError(
        f"got {accuracy:.1%} exact answers after {steps} steps, expected {lowest:.0%} to {highest:.0%}: "
        "try another --seed, and report this if it happens again"
    )


def make_model(
    role: Role,
    recipe: Recipe,
    *,
    seed: int,
    dev: list[Problem],
    excluded: list[Problem],
    folder: Path,
    say: Callable[[str], None],
) -> Made:
    """Build, train and save one model with its tokenizer, as a Hugging Face folder.

    Teacher and student differ in their starting weights and in their training problems, none of which is `excluded`.

    Raises ModelError as `train_into_band` does.
    """
    seed = 2 * seed + (role == "student")
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer, seed)
    made = train_into_band(model, tokenizer, recipe, endless_batches(seed, BATCH_SIZE, excluded), dev, say)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return made


def _answer_loss(model: Qwen2ForCausalLM, ids_BS: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Mean cross-entropy of the answer's tokens; the question is random and cannot be learned."""
    logits_BTV = model(input_ids=ids_BS[:, :-1], use_cache=False).logits[:, prompt_length - 1 :]
    return F.cross_entropy(logits_BTV.flatten(0, 1), ids_BS[:, prompt_length:].flatten())


Snapshot = tuple[dict[str, torch.Tensor], dict[str, Any]]


def _snapshot(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer) -> Snapshot:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def _restore(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, kept: Snapshot) -> None:
    model.load_state_dict(kept[0])
    # The optimizer takes over the tensors that it is given and would change the kept ones.
    optimizer.load_state_dict(copy.deepcopy(kept[1]))
