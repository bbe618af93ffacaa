"""Ranges of numeric keys: every key has both bounds, and its consumers accept the values at both of them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import faulthandler
import math
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import annotated_types
import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.functional import log_softmax

from recipe_gkd.actor.batch.packing import micro_batches
from recipe_gkd.actor.learning_rate import learning_rate
from recipe_gkd.actor.megatron.model_dims import ModelDims, Rope
from recipe_gkd.actor.student_dims import MoEConfig
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.config import Config, limits, ranges
from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.key_types import known_keys
from recipe_gkd.config.load import to_config
from recipe_gkd.config.ranges import numeric_range
from recipe_gkd.config.validate import validate
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.samples import Reward, Sample, TeacherTopK
from recipe_gkd.data.tokenization import truncate_prompt
from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.losses import Divergence, topk_divergence
from recipe_gkd.losses.policy import grpo_loss
from recipe_gkd.losses.sampled_token import importance_weights, k1, k2, k3
from recipe_gkd.metrics.advice.resource_layout import ResourceLayout
from recipe_gkd.quickstart import reward
from recipe_gkd.ray_cluster.pools import choose_nodes, pool_specs
from recipe_gkd.rewards import RewardScorer, child
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.sampling import request_seed, sampling_from
from recipe_gkd.weight_sync.bucket_plan import plan_buckets
from teacher.records import LogitSettings, TeacherSequence
from teacher.wire.limits import LIMITS
from teacher.wire.messages import Score
from teacher.wire.protocol import decode, encode
from teacher.wire.request_checks import check_top_k
from tests._support.base_config import CONFIG_NAME
from tests._support.count_consumers import (
    PROMPT,
    RESPONSE,
    check_count_limit,
    check_intervals,
    connect_to_teacher,
    hold_conversation,
    run_schedule,
    value_at,
)
from tests._support.data_sets import data_set_of
from tests._support.errors import raises
from tests._support.numeric_ends import ends_of

MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
FSDP = "actor_rollout_ref.actor.fsdp_config"
LORA = "actor_rollout_ref.actor.lora"
OPTIM, TEACHER = "actor_rollout_ref.actor.optim", "actor_rollout_ref.teacher"
LISTS = ("betas", "trainer.profile.steps", "trainer.profile.ranks")  # keys with several numbers
KEYS = [name for name in known_keys() if numeric_range(name)]

# Overrides that a key needs in addition to its own value.
NEEDS: dict[str, dict[str, Any]] = {
    "actor_rollout_ref.rollout.max_model_len": {"data.max_prompt_length": 1, "data.max_response_length": 1},
    "actor_rollout_ref.rollout.max_num_batched_tokens": {f"{ROLLOUT}.max_num_seqs": 1},
    "actor_rollout_ref.rollout.tensor_model_parallel_size": {"rollout.n_gpus_per_node": 1024},
    "actor_rollout_ref.rollout.val_kwargs.n": {f"{ROLLOUT}.val_kwargs.temperature": 1.0},
    f"{MEGATRON}.tensor_model_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.pipeline_model_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.context_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.expert_model_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.expert_tensor_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": {
        "trainer.n_gpus_per_node": 2,
        f"{MEGATRON}.pipeline_model_parallel_size": 2,
    },
    f"{FSDP}.fsdp_size": {"actor_rollout_ref.actor.strategy": "fsdp", "trainer.n_gpus_per_node": 1024},
    f"{LORA}.alpha": {f"{LORA}.rank": 1},
    f"{LORA}.dropout": {f"{LORA}.rank": 1},
    f"{OPTIM}.min_lr": {f"{OPTIM}.lr": 1.0},
    "gkd.distill_loss_coef": {"gkd.sft_share": 0.5},
    "trainer.max_staleness": {"trainer.scheduler": "n_step_off"},
    "trainer.test_freq": {"data.val_files": ["x"], "custom_reward_function.path": "x"},
}


def config_with(overrides: dict[str, Any]) -> Config:
    composed = copy.deepcopy(COMPOSED)
    for name, value in overrides.items():
        OmegaConf.update(composed, name, value)
    config = to_config(composed)
    validate(config)
    return config


COMPOSED = compose_config(CONFIG_NAME, ["data.train_files=x", "actor_rollout_ref.model.path=nowhere"])


def ends(name: str) -> tuple[Any, Any]:
    """Return the smallest and the largest value of a key."""
    found = numeric_range(name)
    assert found is not None
    low, high = ends_of(found)
    return ([low, low], [high, high]) if name.endswith(LISTS) else (low, high)


# ---- consumers of keys


def pass_deadline(config: Config, name: str) -> None:
    """Pass a timeout to each kind of call that waits."""
    timeout_s = value_at(config, name)

    async def awaited() -> None:
        async with asyncio.timeout(timeout_s):
            pass

    asyncio.run(awaited())
    threading.Condition().wait_for(lambda: True, timeout_s)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set("key", "value")
    store.wait(["key"], timedelta(seconds=timeout_s))
    assert timedelta(seconds=timeout_s) > timedelta(0)
    with socket.socket() as one:
        one.settimeout(timeout_s)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s) + 1, 0))
    if name != f"{TEACHER}.max_wait_s":
        assert math.ceil(timeout_s * 1000) < 2**31, "poll() takes an int of milliseconds"
    faulthandler.dump_traceback_later(timeout_s + 60)
    faulthandler.cancel_dump_traceback_later()


def encode_teacher_request(config: Config, name: str) -> None:
    teacher = config.actor_rollout_ref.teacher
    support_ids_TJ = np.zeros((1, teacher.student_top_k), np.int32)
    sequences = [TeacherSequence(np.zeros(2, np.int32), prompt_len=1, support_ids_TJ=support_ids_TJ)]
    temperature, top_k = config.gkd.distill_temperature, teacher.top_k
    frames = encode(
        Score(
            1,
            teacher.timeout_s,
            sequences,
            LogitSettings(temperature),
            top_k=check_top_k(top_k),
            wire_dtype=teacher.wire_dtype,
        )
    )
    received = decode([bytes(frame) for frame in frames])
    assert isinstance(received, Score) and received.timeout_s == teacher.timeout_s
    if name.endswith("timeout_s"):
        pass_deadline(config, name)


def seed_generators(config: Config, name: str) -> None:
    value = config.data.seed
    assert 0 <= request_seed(value, 2**63 - 1, 10**9) < 2**63
    np.random.default_rng([value, limits.MAX_EPOCHS]).permutation(2)
    np.random.RandomState(value)
    offsets = 2718 + 1024 + 100 * limits.MAX_DEVICES + limits.MAX_DEVICES  # Megatron adds these per rank
    for seed in (value, value + offsets):
        torch.Generator().manual_seed(seed)


def take_optimizer_steps(config: Config, name: str) -> None:
    """Check that AdamW steps leave finite weights, and that Megatron accepts the same settings."""
    from megatron.core.optimizer import OptimizerConfig

    optim = config.actor_rollout_ref.actor.optim
    OptimizerConfig(
        lr=optim.lr, min_lr=optim.min_lr, weight_decay=optim.weight_decay, clip_grad=optim.clip_grad,
        adam_beta1=optim.betas[0], adam_beta2=optim.betas[1],
    )  # fmt: skip
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
    for step, total in ((0, 1), (0, limits.MAX_STEPS), (limits.MAX_STEPS - 1, limits.MAX_STEPS)):
        rate = learning_rate(step, total, optim)
        assert 0 <= rate <= optim.lr
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor([1.0, -1.0, 1e-6, 0.0])
        if optim.clip_grad:
            torch.nn.utils.clip_grad_norm_([weight], optim.clip_grad)
        optimizer.step()
        assert weight.isfinite().all()


def compute_losses(config: Config, name: str) -> None:
    """Check that every part of the objective, and its gradient, is finite."""
    gkd = config.gkd
    generator = torch.Generator().manual_seed(0)
    teacher, student = (4 * torch.randn(3, 8, generator=generator) for _ in range(2))
    logps, ids = log_softmax(teacher / gkd.distill_temperature, 1).topk(3)
    parts: list[torch.Tensor] = []
    logits = student.requires_grad_()
    for kind in ("jsd", "kl_rkl", "skewed_forward_kl", "skewed_reverse_kl"):
        divergence = Divergence(
            kind=kind,
            temperature=gkd.distill_temperature,
            parameters={"beta": gkd.beta, "rkl_ratio": gkd.rkl_ratio, "skew_alpha": gkd.skew_alpha},
        )
        loss, _ = topk_divergence(logits, logps, ids, divergence, vocab_size=8, chunk_tokens=gkd.chunk_tokens)
        parts.append(gkd.distill_loss_coef * loss)
    logp = log_softmax(logits, 1)[:, 0]
    older = torch.tensor([-30.0, -1.0, -1e-3])
    weights = importance_weights(logp, older, "truncate", gkd.importance_cap)
    parts += [gkd.distill_loss_coef * weights * estimate(logp, logps[:, 0]) for estimate in (k1, k2, k3)]
    clip = dict(clip_low=gkd.clip_ratio_low, clip_high=gkd.clip_ratio_high, clip_c=gkd.clip_ratio_c)
    for advantage in (-1.0, 1.0):
        parts.append(gkd.rl_loss_coef * grpo_loss(logp, older, torch.full((3,), advantage), **clip)[0])
    parts.append(gkd.sft_loss_coef * -logp)
    total = torch.stack(parts).sum()
    total.backward()
    assert total.isfinite() and logits.grad is not None and logits.grad.norm().isfinite()


def load_data(config: Config, name: str) -> None:
    """Check that batches can be made, and that the index of the last sample of the longest run fits into int64."""
    data = PromptData(DATA_SET, config.data, build_tokenizer())
    n, trainer = config.actor_rollout_ref.rollout.n, config.trainer
    loader = PromptLoader(
        data, config.data, n=n, epochs=trainer.total_epochs, max_steps=trainer.total_training_steps,
        sft_share=0.0,
    )  # fmt: skip
    small = dataclasses.replace(config.data, train_batch_size=1)
    loader.config = small if config.data.train_batch_size > 1000 else config.data
    last = loader.last_step(0, 0)
    batch = next(loader.batches((last - 1) * loader.config.train_batch_size, last - 1))
    most = limits.MAX_STEPS * limits.MAX_BATCH * limits.MAX_GROUP, limits.MAX_INT32 * limits.MAX_EPOCHS * n
    for uid in (*(prompt.uid for prompt in batch.prompts), *most):
        np.int64(uid)
        request_seed(1, uid, last)


def select_rows(config: Config, name: str) -> None:
    max_samples = getattr(config.data, name.removeprefix("data."))
    assert len(DATA_SET.limited_to(max_samples)) == len(DATA_SET)
    assert [row.index for row in DATA_SET.limited_to(2)] == [0, 1]


def make_micro_batches(config: Config, name: str) -> None:
    actor = config.actor_rollout_ref.actor
    sample = Sample(prompt=PROMPT, response=RESPONSE, teacher=TeacherTopK.absent(2))
    for max_token_len in (None, actor.max_token_len):
        batches = micro_batches([sample] * 3, micro_batch_size=actor.micro_batch_size, max_token_len=max_token_len)
        assert sum(map(len, batches)) == 3
    torch.tensor([actor.max_token_len], dtype=torch.int32)


def call_async_function(config: Config, name: str) -> None:
    """Check that each response is scored for any number of concurrent calls."""

    async def compute_score(response: str) -> float:
        return float(response)

    settings = {"kwargs": {}, "label": "", "weight": 1.0}
    function = child.Function(0, compute_score, {"response": "response"}, settings, (), True)
    limits_of_calls = {"max_concurrency": config.custom_reward_function.max_concurrency, "timeout_s": 60.0}
    item = {"prompt": "", "ground_truth": "", "extra": {}, "data_source": ""}
    items = [(item | {"response": str(n)}, 1) for n in range(3)]
    driver, process = Pipe()
    with driver, process:
        asyncio.run(child.score_concurrently(process, [function], items, limits_of_calls, stacks=2))
        assert sorted(driver.recv() for _ in items) == [(n, float(n), {}, ()) for n in range(3)]


def count_failures(config: Config, _: str) -> None:
    """Replace the reward of a failed call, and count it."""
    section = dataclasses.replace(
        config.custom_reward_function, path=reward.__file__, num_workers=1, on_failure="value"
    )
    with RewardScorer(section) as scorer:
        if section.max_failures == 0:
            with raises(RewardError, failures=1):
                scorer._reward_of(RewardError("failed"))
        else:
            assert scorer._reward_of(RewardError("failed")) == Reward(section.failure_value)


def place_pools(config: Config, name: str) -> None:
    """Check that pools of any size are counted, and that Megatron accepts the parallel sizes."""
    specs = pool_specs(config, "cpu")
    assert all(spec.n_workers >= 1 for spec in specs)
    choose_nodes(specs, [{"CPU": float(config.ray_init.num_cpus or 2)}])
    ThreadPoolExecutor(config.custom_reward_function.num_workers).shutdown()  # one thread per process; none is started
    ResourceLayout.of(config)
    if not name.startswith(MEGATRON):
        return
    from recipe_gkd.actor.megatron.model import transformer_config

    wide = 2 * limits.MAX_DEVICES  # dimensions that every parallel size divides
    moe = MoEConfig(layers=(True,) * wide, experts=wide, top_k=2, ffn=wide, normalized=True, shared_ffn=None)
    shape = ModelDims(
        family="qwen3_moe", layers=wide, hidden=64 * wide, ffn=wide, heads=wide, kv_heads=wide, head_dim=64,
        vocab_size=wide, tied=False, qk_norm="head", norm_eps=1e-6, max_positions=64,
        ropes=(Rope(width=64, theta=1e4),), moe=moe if "expert" in name else None,
    )  # fmt: skip
    megatron = config.actor_rollout_ref.actor.megatron
    created = transformer_config(shape, megatron, torch.device("cpu"))
    assert getattr(created, name.rsplit(".", 1)[-1]) == value_at(config, name)


def build_sampling(config: Config, name: str) -> None:
    options = EngineOptions.from_config(config, "cuda")
    assert options.kv_cache_bytes is None or 0 < options.kv_cache_bytes < 2**63
    for phase in ("train", "validation"):
        parameters = sampling_from(config, phase).for_request(0, 0)  # type: ignore[arg-type]
        np.float32(parameters["temperature"])
        np.array([parameters.get("top_k", 0), parameters["max_tokens"], options.max_model_len], np.int32)
    for truncation in ("left", "right", "middle"):
        data: Any = dataclasses.replace(config.data, truncation=truncation)
        assert len(truncate_prompt(np.arange(data.max_prompt_length + 1), data, "row 0")) == data.max_prompt_length


def plan_weight_buckets(config: Config, name: str) -> None:
    bucket_bytes = int(config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * (1 << 20))
    assert bucket_bytes > 0
    buckets = plan_buckets([("a", (1 << 20,), "float32"), ("b", (1,), "float32")], bucket_bytes)
    assert sum(bucket.n_bytes for bucket in buckets) == (4 << 20) + 16


def adapt_linear_layer(config: Config, name: str) -> None:
    """Check that a layer with an adapter has finite outputs, gradients and merged weights."""
    from recipe_gkd.actor.fsdp.lora import (
        adapted_layers,
        adapter_dropout,
        add_adapters,
        initialize_adapters,
        merged_weight,
    )

    lora = config.actor_rollout_ref.actor.lora
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.get_output_embeddings = lambda: None
    if not lora.rank:
        return
    add_adapters(model, lora)
    initialize_adapters(model, config.data.seed)
    with adapter_dropout(model):
        output = model(torch.ones(1, 4))
    output.sum().backward()
    [layer] = adapted_layers(model).values()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(tensor.isfinite().all() for tensor in (output, merged_weight(layer), *gradients))


def consumer_of(name: str) -> Callable[[Config, str], None]:
    last = name.rsplit(".", 1)[-1]
    groups: dict[Callable[[Config, str], None], list[str]] = {
        check_intervals: ["trainer.save_freq", "trainer.test_freq"],
        connect_to_teacher: [f"{TEACHER}.server_port", f"{TEACHER}.n_connections"],
        build_sampling: ["data.max_prompt_length", "data.max_response_length"],
        call_async_function: ["custom_reward_function.max_concurrency"],
        count_failures: ["custom_reward_function.failure_value", "custom_reward_function.max_failures"],
        place_pools: ["custom_reward_function.num_workers", "ray_init.num_cpus"],
        run_schedule: ["trainer.max_staleness", f"{TEACHER}.num_microbatches"],
        encode_teacher_request: [
            *(f"{TEACHER}.{key}" for key in ("timeout_s", "top_k", "student_top_k")),
            "gkd.distill_temperature",
        ],
        seed_generators: ["data.seed"],
        select_rows: ["data.train_max_samples", "data.val_max_samples"],
        load_data: ["data.train_batch_size", f"{ROLLOUT}.n", "trainer.total_epochs", "trainer.total_training_steps"],
        make_micro_batches: ["actor_rollout_ref.actor.micro_batch_size", "actor_rollout_ref.actor.max_token_len"],
        plan_weight_buckets: [f"{ROLLOUT}.update_weights_bucket_megabytes"],
        hold_conversation: [
            *("rollout.max_turns", "rollout.max_tool_response_length", "rollout.max_environment_failures"),
            *("rollout.num_environment_workers", "rollout.conversation_timeout_s"),
        ],
    }
    if chosen := next((function for function, names in groups.items() if name in names), None):
        return chosen
    if last in ("timeout_s", "nccl_timeout", "max_wait_s", "startup_timeout_s", "environment_timeout_s"):
        return pass_deadline
    if last.endswith(("nodes", "n_gpus_per_node", "parallel_size", "n_server_workers", "fsdp_size")):
        return place_pools
    prefixes = {
        f"{LORA}.": adapt_linear_layer,
        f"{OPTIM}.": take_optimizer_steps,
        "gkd.": compute_losses,
        f"{ROLLOUT}.": build_sampling,
    }
    return next((function for prefix, function in prefixes.items() if name.startswith(prefix)), check_count_limit)


DATA_SET = data_set_of({"prompt": ["1+1=", "2+2=", "3+3="]})


@pytest.mark.parametrize("name", KEYS)
def test_key_works_at_both_bounds(name: str) -> None:
    for value in ends(name):
        overrides = {**NEEDS.get(name, {}), name: value}
        config = config_with(overrides)
        consumer_of(name)(config, name)


@pytest.mark.parametrize("temperature", ends("gkd.distill_temperature"))
def test_largest_coefficients_give_finite_losses(temperature: float) -> None:
    bounded = ("_coef", "_cap", "_low", "_high", "_c")
    names = [name for name in KEYS if name.startswith("gkd.") and name.endswith(bounded)]
    assert len(names) == 7
    highest = {name: ends(name)[1] for name in names}
    compute_losses(config_with({"gkd.sft_share": 0.5, "gkd.distill_temperature": temperature, **highest}), "")


def test_key_without_bound_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded = SimpleNamespace(default=SimpleNamespace(metadata=[annotated_types.Ge(0)]))
    monkeypatch.setattr(ranges, "known_keys", lambda: {"data.seed": unbounded})
    with raises(ConfigError, keys=("data.seed",)):
        numeric_range("data.seed")


@pytest.mark.parametrize("name", KEYS)
def test_value_beyond_bounds_is_rejected(name: str) -> None:
    low, high = ends(name)
    beyond = [low, high]
    for number, (value, to) in enumerate(((low, -math.inf), (high, math.inf))):
        bound = value[0] if isinstance(value, list) else value
        outside: Any = math.nextafter(bound, to) if isinstance(bound, float) else bound + (1 if to > 0 else -1)
        beyond[number] = [outside, outside] if isinstance(value, list) else outside
    for value in beyond:
        with raises(ConfigError, keys=(name,)):
            config_with({name: value})


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("value", [True, False])
def test_boolean_is_no_number(name: str, value: bool) -> None:
    """``false`` would become 0, which is neither "off" nor an error for many keys."""
    with raises(ConfigError, keys=(name,)):
        config_with({name: value})


def test_limits_match_teacher_protocol() -> None:
    assert LIMITS.timeout_s == limits.MAX_TIMEOUT_S
    assert LIMITS.sequence_tokens == limits.MAX_TOKENS
    assert numeric_range(f"{TEACHER}.top_k").high == LIMITS.vocab_size  # type: ignore[union-attr]
    found = numeric_range("gkd.distill_temperature")
    assert found is not None and LIMITS.min_temperature <= found.low <= found.high <= LIMITS.max_temperature


@pytest.mark.parametrize("section", [ROLLOUT, f"{ROLLOUT}.val_kwargs"])
def test_temperature_that_vllm_changes_is_rejected(section: str) -> None:
    for value in (1e-9, 0.0099):
        with raises(ConfigError, keys=(f"{section}.temperature",)):
            config_with({f"{section}.temperature": value})
    for value in (0, 0.01, 2.0):
        config_with({f"{section}.temperature": value})
