"""Every numeric key has both bounds, and the code that consumes a key accepts the value at each of them."""

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import annotated_types
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.functional import log_softmax

from recipe_gkd.actor.microbatch import micro_batches
from recipe_gkd.actor.model_dims import ModelDims, MoEConfig
from recipe_gkd.actor.optimizer import learning_rate
from recipe_gkd.config import Config, limits, ranges
from recipe_gkd.config.load import compose_config, known_keys, to_config
from recipe_gkd.config.ranges import numeric_range
from recipe_gkd.config.validate import validate
from recipe_gkd.data.prompts import PromptData, PromptLoader, _truncate, read_table
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.errors import ConfigError
from recipe_gkd.losses import Divergence, topk_divergence
from recipe_gkd.losses.policy import grpo_loss
from recipe_gkd.losses.sampled_token import importance_weights, k1, k2, k3
from recipe_gkd.metrics.changes import ResourceLayout
from recipe_gkd.quickstart.tokenizer import build_tokenizer
from recipe_gkd.ray_cluster.pools import choose_nodes, pool_specs
from recipe_gkd.rollout.engine import EngineOptions
from recipe_gkd.rollout.sampling import request_seed, sampling_from
from recipe_gkd.weight_sync.bucket_plan import plan_buckets
from teacher.records import TeacherSequence
from teacher.wire.messages import LIMITS, Score
from teacher.wire.protocol import decode, encode_score
from tests._support.count_consumers import ANSWER, PROMPT, at, come_due, connect, count, schedule
from tests._support.numeric_ends import ends_of

MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
OPTIM, TEACHER = "actor_rollout_ref.actor.optim", "actor_rollout_ref.teacher"
KEYS = [name for name in known_keys() if numeric_range(name)]

NEEDS: dict[str, dict[str, Any]] = {
    "actor_rollout_ref.rollout.max_model_len": {"data.max_prompt_length": 1, "data.max_response_length": 1},
    "actor_rollout_ref.rollout.tensor_model_parallel_size": {"rollout.n_gpus_per_node": 1024},
    "actor_rollout_ref.rollout.val_kwargs.n": {f"{ROLLOUT}.val_kwargs.temperature": 1.0},
    f"{MEGATRON}.tensor_model_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.pipeline_model_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.expert_model_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.expert_tensor_parallel_size": {"trainer.n_gpus_per_node": 1024},
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": {
        "trainer.n_gpus_per_node": 2,
        f"{MEGATRON}.pipeline_model_parallel_size": 2,
    },
    f"{OPTIM}.min_lr": {f"{OPTIM}.lr": 1.0},
    "gkd.distill_loss_coef": {"gkd.sft_share": 0.5},
    "trainer.max_staleness": {"trainer.scheduler": "n_step_off"},
    "trainer.test_freq": {"data.val_files": ["x"], "custom_reward_function.path": "x"},
}
"""Overrides that a key needs besides its value for a configuration that can work."""
REFUSED = {f"{MEGATRON}.context_parallel_size=1024": "context parallel is not supported"}


def configured(overrides: dict[str, Any]) -> Config:
    composed = copy.deepcopy(COMPOSED)
    for name, value in overrides.items():
        OmegaConf.update(composed, name, value)
    config = to_config(composed)
    validate(config)
    return config


COMPOSED = compose_config("on_policy_distill_trainer", ["data.train_files=x", "actor_rollout_ref.model.path=nowhere"])


def ends(name: str) -> tuple[Any, Any]:
    found = numeric_range(name)
    assert found is not None
    low, high = ends_of(found)
    return ([low, low], [high, high]) if name.endswith("betas") else (low, high)


# ---- the code that consumes a key, or what it hands the value to


def wait(config: Config, name: str) -> None:
    """Pass a deadline to each kind of call that waits."""
    seconds = at(config, name)

    async def awaited() -> None:
        async with asyncio.timeout(seconds):
            pass

    asyncio.run(awaited())
    threading.Condition().wait_for(lambda: True, seconds)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    store.set("key", "value")
    store.wait(["key"], timedelta(seconds=seconds))
    assert timedelta(seconds=seconds) > timedelta(0)
    with socket.socket() as one:
        one.settimeout(seconds)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds) + 1, 0))
    if name != f"{TEACHER}.max_wait_s":
        assert math.ceil(seconds * 1000) < 2**31, "poll() takes an int of milliseconds"
    faulthandler.dump_traceback_later(seconds + 60)
    faulthandler.cancel_dump_traceback_later()


def ask_teacher(config: Config, name: str) -> None:
    teacher = config.actor_rollout_ref.teacher
    sequences = [TeacherSequence(np.zeros(2, np.int32), prompt_len=1)]
    temperature, top_k = config.gkd.distill_temperature, teacher.top_k
    frames = encode_score(1, teacher.timeout_s, sequences, temperature, top_k=top_k, wire_dtype=teacher.wire_dtype)
    received = decode([bytes(frame) for frame in frames])
    assert isinstance(received, Score) and received.timeout_s == teacher.timeout_s
    if name.endswith("timeout_s"):
        wait(config, name)


def seed(config: Config, name: str) -> None:
    value = config.data.seed
    assert 0 <= request_seed(value, 2**63 - 1, 10**9) < 2**63
    np.random.default_rng([value, limits.MAX_EPOCHS]).permutation(2)
    np.random.RandomState(value)
    offsets = 2718 + 1024 + 100 * limits.MAX_DEVICES + limits.MAX_DEVICES  # Megatron adds these of a rank
    for own in (value, value + offsets):
        torch.Generator().manual_seed(own)


def optimize(config: Config, name: str) -> None:
    """One step of AdamW at each rate of the schedule leaves finite weights; Megatron takes the same numbers."""
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


def lose(config: Config, name: str) -> None:
    """Each part of the objective, and its gradient, is finite."""
    gkd = config.gkd
    generator = torch.Generator().manual_seed(0)
    teacher, student = (4 * torch.randn(3, 8, generator=generator) for _ in range(2))
    logps, ids = log_softmax(teacher / gkd.distill_temperature, 1).topk(3)
    parts: list[torch.Tensor] = []
    logits = student.requires_grad_()
    for kind in ("jsd", "kl_rkl", "skewed_forward_kl", "skewed_reverse_kl"):
        divergence = Divergence(
            kind=kind, temperature=gkd.distill_temperature,  # type: ignore[arg-type]
            beta=gkd.beta, rkl_ratio=gkd.rkl_ratio, skew_alpha=gkd.skew_alpha,
        )  # fmt: skip
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
    """The last sample of the longest run has a number that int64 holds, and its batches can be made."""
    data = PromptData(TABLE, config.data, build_tokenizer())
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


def divide(config: Config, name: str) -> None:
    actor = config.actor_rollout_ref.actor
    sample = Sample(prompt=PROMPT, response=ANSWER, teacher=TeacherTopK.absent(2))
    for max_token_len in (None, actor.max_token_len):
        batches = micro_batches([sample] * 3, micro_batch_size=actor.micro_batch_size, max_token_len=max_token_len)
        assert sum(map(len, batches)) == 3
    torch.tensor([actor.max_token_len], dtype=torch.int32)


def lay_out(config: Config, name: str) -> None:
    """Pools of any size are counted, and refused by a machine that is too small for them."""
    specs = pool_specs(config, "cpu")
    assert all(spec.n_workers >= 1 for spec in specs)
    choose_nodes(specs, [{"CPU": float(config.ray_init.num_cpus or 2)}])
    ThreadPoolExecutor(config.custom_reward_function.num_workers).shutdown()  # a thread for each process, none started
    ResourceLayout.of(config)
    if not name.startswith(MEGATRON):
        return
    from recipe_gkd.actor.model import transformer_config

    wide = 2 * limits.MAX_DEVICES  # a model that every layout divides
    mixture = MoEConfig(layers=(True,) * wide, experts=wide, top_k=2, ffn=wide, normalized=True, shared_ffn=None)
    shape = ModelDims(
        family="qwen3_moe", layers=wide, hidden=64 * wide, ffn=wide, heads=wide, kv_heads=wide, head_dim=64,
        vocab_size=wide, tied=False, qkv_bias=False, qk_norm=True, norm_eps=1e-6, max_positions=64, rope_base=1e4,
        rope_llama3_factor=None, mixture=mixture if "expert" in name else None,
    )  # fmt: skip
    megatron = config.actor_rollout_ref.actor.megatron
    made = transformer_config(shape, megatron, torch.device("cpu"))
    assert getattr(made, name.rsplit(".", 1)[-1]) == at(config, name)


def generate(config: Config, name: str) -> None:
    options = EngineOptions.from_config(config, "cuda")
    assert options.kv_cache_bytes is None or 0 < options.kv_cache_bytes < 2**63
    for which in ("train", "validation"):
        parameters = sampling_from(config, which).for_request(0, 0)  # type: ignore[arg-type]
        np.float32(parameters["temperature"])
        np.array([parameters.get("top_k", 0), parameters["max_tokens"], options.max_model_len], np.int32)
    for truncation in ("left", "right", "middle"):
        data: Any = dataclasses.replace(config.data, truncation=truncation)
        assert len(_truncate(np.arange(data.max_prompt_length + 1), data, 0)) == data.max_prompt_length


def send_weights(config: Config, name: str) -> None:
    bucket_bytes = int(config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * (1 << 20))
    assert bucket_bytes > 0
    buckets = plan_buckets([("a", (1 << 20,), "float32"), ("b", (1,), "float32")], bucket_bytes)
    assert sum(bucket.n_bytes for bucket in buckets) == (4 << 20) + 16


def consumer(name: str) -> Callable[[Config, str], None]:
    last = name.rsplit(".", 1)[-1]
    groups: dict[Callable[[Config, str], None], list[str]] = {
        come_due: ["trainer.save_freq", "trainer.test_freq"],
        connect: [f"{TEACHER}.server_port"],
        generate: ["data.max_prompt_length", "data.max_response_length"],
        lay_out: ["custom_reward_function.num_workers", "ray_init.num_cpus"],
        schedule: ["trainer.max_staleness", f"{TEACHER}.num_microbatches"],
        ask_teacher: [f"{TEACHER}.timeout_s", f"{TEACHER}.top_k", "gkd.distill_temperature"],
        seed: ["data.seed"],
        load_data: ["data.train_batch_size", f"{ROLLOUT}.n", "trainer.total_epochs", "trainer.total_training_steps"],
        divide: ["actor_rollout_ref.actor.micro_batch_size", "actor_rollout_ref.actor.max_token_len"],
        send_weights: [f"{ROLLOUT}.update_weights_bucket_megabytes"],
    }
    if chosen := next((function for function, names in groups.items() if name in names), None):
        return chosen
    if last in ("timeout_s", "nccl_timeout", "max_wait_s", "startup_timeout_s"):
        return wait
    if last.endswith(("nodes", "n_gpus_per_node", "parallel_size", "n_server_workers")):
        return lay_out
    prefixes = {f"{OPTIM}.": optimize, "gkd.": lose, f"{ROLLOUT}.": generate}
    return next((function for prefix, function in prefixes.items() if name.startswith(prefix)), count)


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory: pytest.TempPathFactory) -> None:
    global TABLE
    path: Path = tmp_path_factory.mktemp("data") / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "2+2=", "3+3="]}), path)
    TABLE = read_table([str(path)], "prompt")


TABLE: pa.Table


@pytest.mark.parametrize("name", KEYS)
def test_a_key_works_at_both_ends_of_its_range(name: str) -> None:
    for value in ends(name):
        overrides = {**NEEDS.get(name, {}), name: value}
        if refusal := REFUSED.get(f"{name}={value}"):
            with pytest.raises(ConfigError, match=refusal):
                configured(overrides)
            continue
        config = configured(overrides)
        consumer(name)(config, name)


@pytest.mark.parametrize("temperature", ends("gkd.distill_temperature"))
def test_all_coefficients_at_their_upper_end_give_finite_losses_and_gradients(temperature: float) -> None:
    bounded = ("_coef", "_cap", "_low", "_high", "_c")
    names = [name for name in KEYS if name.startswith("gkd.") and name.endswith(bounded)]
    assert len(names) == 7
    highest = {name: ends(name)[1] for name in names}
    lose(configured({"gkd.sft_share": 0.5, "gkd.distill_temperature": temperature, **highest}), "")


def test_a_key_without_a_bound_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded = SimpleNamespace(default=SimpleNamespace(metadata=[annotated_types.Ge(0)]))
    monkeypatch.setattr(ranges, "known_keys", lambda: {"data.seed": unbounded})
    with pytest.raises(ValueError, match=r"data\.seed lacks a bound"):
        numeric_range("data.seed")


@pytest.mark.parametrize("name", KEYS)
def test_a_value_beyond_either_end_is_refused_with_the_key(name: str) -> None:
    low, high = ends(name)
    beyond = [low, high]
    for number, (value, to) in enumerate(((low, -math.inf), (high, math.inf))):
        one = value[0] if isinstance(value, list) else value
        out: Any = math.nextafter(one, to) if isinstance(one, float) else one + (1 if to > 0 else -1)
        beyond[number] = [out, out] if isinstance(value, list) else out
    for value in beyond:
        with pytest.raises(ConfigError, match=rf"{name}[.\d]*: got"):
            configured({name: value})


def test_limits_of_the_teacher_service_are_those_of_its_protocol() -> None:
    assert LIMITS.timeout_s == limits.MAX_TIMEOUT_S
    assert LIMITS.sequence_tokens == limits.MAX_TOKENS
    assert numeric_range(f"{TEACHER}.top_k").high == LIMITS.vocab_size  # type: ignore[union-attr]
    found = numeric_range("gkd.distill_temperature")
    assert found is not None and LIMITS.min_temperature <= found.low <= found.high <= LIMITS.max_temperature


@pytest.mark.parametrize("section", [ROLLOUT, f"{ROLLOUT}.val_kwargs"])
def test_a_temperature_that_vllm_would_change_is_refused(section: str) -> None:
    for value in (1e-9, 0.0099):
        with pytest.raises(ConfigError, match=rf"{section}\.temperature: got .*vLLM would sample at 0\.01 instead"):
            configured({f"{section}.temperature": value})
    for value in (0, 0.01, 2.0):
        configured({f"{section}.temperature": value})
