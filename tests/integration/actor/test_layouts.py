"""On any layout and any division into micro-batches, training is what a plain program does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import (
    ACTOR,
    MEGATRON,
    VOCAB,
    make_config,
    make_folder,
    make_sample,
    make_samples,
    transformers_logits,
)
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import reference_training

pytestmark = pytest.mark.timeout(150)

BATCHES = [make_samples(9), make_samples(9, seed=1)]
TP2, PP2 = f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"
SP, VPP2 = f"{MEGATRON}.sequence_parallel=true", f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
PADDED_VOCAB = 128
PLAIN_OPTIMIZER = f"{MEGATRON}.use_distributed_optimizer=false"
BY_SAMPLES = f"{ACTOR}.use_dynamic_bsz=false"
RECOMPUTE = [
    f"{MEGATRON}.override_transformer_config.recompute_{key}"
    for key in ("granularity=full", "method=uniform", "num_layers=1")
]

LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen2", 1, []),
    "one process, plain optimizer": ("qwen2", 1, [PLAIN_OPTIMIZER]),
    "micro-batches of 1": ("qwen2", 1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=1"]),
    "micro-batches of 2": ("qwen2", 1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=2"]),
    "micro-batches of 7": ("qwen2", 1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=7"]),
    "recomputed activations": ("qwen2", 1, RECOMPUTE),
    "untied": ("qwen2_untied", 1, []),
    "qwen3": ("qwen3", 1, []),
    "tensor 2": ("qwen2", 2, [TP2]),
    "tensor 2, sequence parallel": ("qwen2", 2, [TP2, SP]),
    "tensor 2, sequence parallel, qwen3": ("qwen3", 2, [TP2, SP]),
    "tensor 2, llama": ("llama", 2, [TP2]),
    "pipeline 2": ("qwen2", 2, [PP2]),
    "pipeline 2, untied": ("qwen2_untied", 2, [PP2]),
    "pipeline 2, interleaved": ("qwen2", 2, [PP2, VPP2]),
    "data 2": ("qwen2", 2, []),
    "data 2, plain optimizer, by samples": ("qwen2", 2, [PLAIN_OPTIMIZER, BY_SAMPLES, f"{ACTOR}.micro_batch_size=2"]),
    "tensor 2 x pipeline 2, sequence parallel": ("qwen2", 4, [TP2, PP2, SP]),
    "tensor 2 x data 2": ("qwen2_untied", 4, [TP2]),
}  # fmt: skip


@cache
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor], Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logits = transformers_logits(model, [sample for sample in BATCHES[0] if len(sample.response.ids)])
    return *reference_training(folder, BATCHES), logits


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_a_plain_program_does(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    kind, ranks, overrides = LAYOUTS[name]
    want_metrics, want_weights, want_logits = reference(folders[kind])
    results = pool.run(ranks, jobs.train, make_config(folders[kind], *overrides, ranks=ranks), BATCHES)

    last_stages = [logits for logits, *_ in results if logits is not None]
    assert last_stages
    for logits in last_stages:
        torch.testing.assert_close(logits[: len(want_logits)], want_logits, rtol=0, atol=1e-5)
    for _, metrics, _, _ in results:
        assert_metrics(metrics, want_metrics)
    _, _, weights, meta = results[0]
    assert all(not other for _, _, other, _ in results[1:]), "only rank 0 may be given weights"
    assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()] == meta
    assert_weights(weights, want_weights)


def assert_metrics(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-5), (step, key)


def assert_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, tensor in got.items():
        if name.endswith("k_proj.bias"):
            continue  # attention does not depend on it: its gradient is rounding noise, of which Adam keeps the sign
        largest, *others = (tensor.double() - want[name]).abs().flatten().sort(descending=True).values.tolist()
        assert sum(others) / len(others) < 2e-6, name
        # A gradient close to zero is mostly rounding, which Adam scales up: its steps together are 2e-2 long.
        assert max(others) < 2e-3 and largest < 2e-2, name


def test_bfloat16_trains_with_float32_copies(pool: WorkerPool, folders: dict[str, Path]) -> None:
    config = make_config(folders["qwen2"], TP2, SP, f"{MEGATRON}.dtype=bfloat16", ranks=2)
    want_metrics, _, _ = reference(folders["qwen2"])
    _, metrics, weights, meta = pool.run(2, jobs.train, config, BATCHES)[0]
    assert {dtype for _, _, dtype in meta} == {"bfloat16"} == {str(t.dtype)[6:] for t in weights.values()}
    for one, other in zip(metrics, want_metrics, strict=True):
        assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=1e-2)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=3e-2)


@pytest.mark.parametrize(("ranks", "overrides"), [(2, []), (4, [TP2, SP])])
def test_ranks_without_work_and_empty_batches_take_part(
    ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    """One sample for two data-parallel ranks, then answers without a token, then no sample at all."""
    one = [next(sample for sample in BATCHES[0] if len(sample.response.ids))]
    silent = [sample for seed in range(9) for sample in make_samples(9, seed=seed) if not len(sample.response.ids)]
    want_metrics, want_weights = reference_training(folders["qwen2"], [one])
    config = make_config(folders["qwen2"], *overrides, ranks=ranks)
    results = pool.run(ranks, jobs.train, config, [one, silent, []])
    for _, metrics, _, _ in results:
        assert_metrics(metrics[:1], want_metrics)
        assert [m["actor/n_tokens"] for m in metrics[1:]] == [0, 0]
        assert not any("actor/kl_loss" in m for m in metrics[1:]), "a mean over nothing is no number"
        assert metrics == results[0][1], "every rank reports the same"
    assert_weights(results[0][2], want_weights)


def test_logits_are_computed_only_where_there_is_a_loss_and_stay_in_the_dtype_of_training(
    pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders["qwen2"], TP2, SP, f"{MEGATRON}.dtype=bfloat16", ranks=2)
    n_tokens = sum(len(sample.response.ids) for sample in BATCHES[0])
    for rows, columns, dtype in pool.run(2, jobs.logits_of_a_loss, config, BATCHES[0]):
        assert (rows, columns, dtype) == (n_tokens, PADDED_VOCAB // 2, torch.bfloat16)


N_TOKENS = 80
BF16 = f"{MEGATRON}.dtype=bfloat16"


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        pytest.param("qwen2", [], id="tied, data 2"),
        pytest.param("qwen2", [TP2, BF16], id="tied, tensor 2, bfloat16"),
        pytest.param("qwen2", [PP2, BF16, PLAIN_OPTIMIZER], id="tied, pipeline 2, bfloat16, plain optimizer"),
        pytest.param("qwen2_untied", [BF16], id="untied, data 2, bfloat16"),
        pytest.param("qwen2_untied", [TP2, PLAIN_OPTIMIZER], id="untied, tensor 2, plain optimizer"),
    ],
)
def test_padding_rows_are_bitwise_unchanged_by_updates(
    kind: str, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    def below(ids: Any) -> Any:
        return ids % N_TOKENS

    batches = [
        [
            make_sample(s.prompt.uid, below(s.prompt.ids), below(s.response.ids), s.teacher.logps_TK, support(s))
            for s in batch
        ]
        for batch in [*BATCHES, BATCHES[0]]
    ]
    config = make_config(folders[kind], *overrides, f"{ACTOR}.optim.weight_decay=10", ranks=2)
    results = pool.run(2, jobs.keep_padding, config, batches, N_TOKENS)
    before, after, _ = results[0]
    assert all(unchanged for _, _, unchanged in results)
    names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (kind == "qwen2_untied")
    for name in names:
        assert before[name][N_TOKENS:].abs().min() > 0
        assert torch.equal(before[name][N_TOKENS:], after[name][N_TOKENS:])
        assert (before[name][:N_TOKENS] != after[name][:N_TOKENS]).any(1).all(), "decay reaches every token's row"


def support(sample: Sample) -> np.ndarray:
    return np.tile(np.arange(sample.teacher.ids_TK.shape[1], dtype=np.int32), (len(sample.response.ids), 1))


def test_llama3_rotary_scaling_equals_transformers(pool: WorkerPool, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama3", "llama3")
    ids = np.random.default_rng(0).integers(0, VOCAB, 240)  # far enough for the scaled frequencies to matter
    sample = make_sample(0, ids[:220], ids[220:], np.full((20, 1), -1.0), np.zeros((20, 1)))
    logits = pool.run(1, jobs.logits_of, make_config(folder), [sample])[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    want = transformers_logits(model, [sample])
    torch.testing.assert_close(logits[: len(want)], want, rtol=0, atol=1e-5)

    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(values))
    unscaled = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), [sample])
    assert (unscaled - want).abs().max() > 1e-2
