"""States of the actor that leave the device: the training is bitwise the same, and the memory is really free."""

from __future__ import annotations

from functools import cache
from itertools import starmap
from pathlib import Path

import pytest
import torch
import transformers

from recipe_gkd.actor.offload import SLEEP_LEVEL
from recipe_gkd.config import Config
from tests._support.layouts import BF16, CP2, OVERLAP, PLAIN_OPTIMIZER, PP2, SP, TP2, VPP2
from tests._support.qwen2 import random_qwen2
from tests._support.tiny_models import ACTOR, MEGATRON, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import offload_jobs
from tests.integration.actor.offload_jobs import STATES, Result

BATCHES = [make_samples(6, seed=seed) for seed in range(3)]
ASYNC = f"{ACTOR}.checkpoint.async_save=true"
FSDP_CONFIG = f"{ACTOR}.fsdp_config"
FSDP = [f"{ACTOR}.strategy=fsdp", f"{FSDP_CONFIG}.dtype=float32"]
LORA = [*FSDP, f"{ACTOR}.lora.rank=4"]
KEYS = {"params": "param_offload", "grads": "grad_offload", "optimizer": "optimizer_offload"}
CASES: dict[str, tuple[int, list[str]]] = {
    "megatron float32": (1, []),
    "megatron bfloat16, 2 ranks": (2, [BF16]),
    "megatron bfloat16, overlapped, 2 ranks": (2, [BF16, *OVERLAP]),
    "megatron float32, 2 ranks": (2, []),
    "megatron bfloat16, plain optimizer": (1, [BF16, PLAIN_OPTIMIZER]),
    "megatron float32, plain optimizer, 2 ranks": (2, [PLAIN_OPTIMIZER]),
    "megatron tensor 2": (2, [TP2, SP]),
    "megatron LoRA, 2 ranks": (2, [BF16, LORA[-1]]),
    "fsdp 2 ranks": (2, FSDP),
    "fsdp bfloat16": (1, [FSDP[0]]),
    "fsdp LoRA": (1, LORA),
    "fsdp LoRA, 2 ranks": (2, LORA),
}
DEFAULT_CASES = ("megatron bfloat16, 2 ranks", "fsdp LoRA")
PARAMETERS = [pytest.param(name, marks=() if name in DEFAULT_CASES else pytest.mark.slow) for name in CASES]


def offloads(overrides: list[str], states: tuple[str, ...]) -> list[str]:
    """Return the overrides that make states leave. FSDP has no key for gradients, which are never kept."""
    section, known = (FSDP_CONFIG, ("params", "optimizer")) if FSDP[0] in overrides else (MEGATRON, STATES)
    return [f"{section}.{KEYS[state]}=true" for state in states if state in known]


def configured(folder: Path, name: str, states: tuple[str, ...] = (), *others: str) -> Config:
    ranks, overrides = CASES[name]
    return make_config(folder, *overrides, *offloads(overrides, states), *others, ranks=ranks)


def assert_equal(found: Result, want: Result) -> None:
    """Compare everything bitwise."""
    assert found.metrics == want.metrics
    for weights, wanted in zip(found.weights, want.weights, strict=True):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights.items())
    assert len(found.states) == len(want.states) and all(map(torch.equal, found.states, want.states))


def last_update(result: Result) -> Result:
    """Return the result of the last update only."""
    return Result(result.metrics[-1:], result.weights[-1:], result.states)


class TestTraining:
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_training_with_all_states_offloaded_is_bitwise_equal(
        self, name: str, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        """The third update is repeated from a background save, during which the states have left."""
        ranks, path = CASES[name][0], tmp_path / "saved"
        plain, offloaded = (configured(folders["qwen2"], name, states, ASYNC) for states in ((), STATES))
        want = pool.run(ranks, offload_jobs.train, plain, BATCHES, None)
        found = pool.run(ranks, offload_jobs.train, offloaded, BATCHES, path)
        list(starmap(assert_equal, zip(found, want, strict=True)))
        resumed = pool.run(ranks, offload_jobs.resume, offloaded, path, BATCHES[2])
        list(starmap(assert_equal, zip(resumed, map(last_update, want), strict=True)))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["megatron bfloat16, overlapped, 2 ranks", "fsdp LoRA"])
    def test_checkpoints_with_and_without_offload_are_interchangeable(
        self, name: str, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        ranks, path = CASES[name][0], tmp_path / "saved"
        plain, offloaded = (configured(folders["qwen2"], name, states, ASYNC) for states in ((), STATES))
        for saving, loading in ((plain, offloaded), (offloaded, plain)):
            want = pool.run(ranks, offload_jobs.train, saving, BATCHES, path)
            resumed = pool.run(ranks, offload_jobs.resume, loading, path, BATCHES[2])
            list(starmap(assert_equal, zip(resumed, map(last_update, want), strict=True)))

    @pytest.mark.slow
    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("name", CASES)
    def test_training_with_one_state_offloaded_is_bitwise_equal(
        self, name: str, state: str, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        ranks, folder = CASES[name][0], folders["qwen2"]
        if FSDP[0] in CASES[name][1] and state == "grads":
            pytest.skip("FSDP always frees gradients after an update, and has no key for it")
        want = pool.run(ranks, offload_jobs.train, configured(folder, name), BATCHES, None)
        found = pool.run(ranks, offload_jobs.train, configured(folder, name, (state,)), BATCHES, None)
        list(starmap(assert_equal, zip(found, want, strict=True)))

    @pytest.mark.parametrize("name", ["megatron float32", pytest.param("fsdp bfloat16", marks=pytest.mark.slow)])
    def test_actor_that_fails_to_update_offloads_and_remains_usable(
        self, name: str, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        folder = folders["qwen2"]
        want = pool.run(1, offload_jobs.train, configured(folder, name), BATCHES, None)[0]
        errors, found = pool.run(1, offload_jobs.train_with_faults, configured(folder, name, STATES), BATCHES)[0]
        assert_equal(found, Result([want.metrics[0], want.metrics[2]], want.weights[2:], want.states))
        not_finite, no_memory, no_space = errors
        assert not_finite.uids and not_finite.phase == "update 0"
        assert SLEEP_LEVEL in no_memory.keys and "OutOfMemoryError" in no_memory.what and no_memory.details
        assert f"{ACTOR}.megatron.param_offload" in no_space.keys and "File too large" in no_space.what


@pytest.mark.parametrize("name", ["megatron bfloat16, 2 ranks", pytest.param("fsdp LoRA", marks=pytest.mark.slow)])
def test_saves_before_first_update_while_offloaded(
    name: str, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = configured(folders["qwen2"], name, STATES)
    before, after = pool.run(CASES[name][0], offload_jobs.save_before_update, config, tmp_path)[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]) and torch.equal(tensor, saved[key]), key


@pytest.fixture(scope="module")
def larger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with 20 MB of float32 weights."""
    folder = tmp_path_factory.mktemp("larger")
    sizes = dict(vocab_size=12_000, hidden_size=256, intermediate_size=1024, max_position_embeddings=64)
    random_qwen2(0, **sizes, tie_word_embeddings=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("overrides", [[], FSDP], ids=["megatron", "fsdp"])
def test_resident_memory_drops_by_size_of_states(overrides: list[str], pool: WorkerPool, larger_folder: Path) -> None:
    config = make_config(larger_folder, *overrides, *offloads(overrides, STATES))
    drops = pool.run(1, offload_jobs.measure_memory, config, BATCHES[0])[0]
    sizes = {state: n_bytes for state, (n_bytes, _) in drops.items()}
    assert sizes["params"] > 18e6 and sizes["optimizer"] >= 2 * sizes["params"]
    assert sizes["grads"] == (0 if overrides else sizes["params"])
    for state, (n_bytes, drop) in drops.items():
        assert drop >= 0.995 * n_bytes, state  # a page may also have memory that does not leave


SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 80]]


@cache
def wanted_log_probs(folder: Path, n_token_ids: int | None) -> list[list[float]]:
    """Return the log-probabilities of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, :-1, :n_token_ids] for ids in SEQUENCES]
    return [
        each.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        for each, ids in zip(logits, SEQUENCES, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "ranks", "overrides", "n_token_ids"),
    [
        pytest.param("qwen2", 1, [], 90, id="one rank, padding ids", marks=pytest.mark.slow),
        pytest.param("qwen2", 2, [TP2, SP], 90, id="tensor 2, padding ids"),
        pytest.param("llama", 2, [PP2], None, id="pipeline 2"),
        pytest.param("llama", 2, [PP2, VPP2], None, id="interleaved", marks=pytest.mark.slow),
        pytest.param("qwen2", 2, [CP2], None, id="context 2"),
        pytest.param("qwen2", 2, [TP2, "gkd.fuse_lm_head=true"], None, id="fused head", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, [], None, id="experts, data 2", marks=pytest.mark.slow),
        pytest.param("qwen2", 2, FSDP, 90, id="fsdp 2, padding ids"),
        pytest.param("qwen2", 2, [*FSDP, "gkd.fuse_lm_head=true"], None, id="fsdp, fused head", marks=pytest.mark.slow),
    ],
)
def test_log_probs_equal_transformers_on_all_ranks(
    kind: str, ranks: int, overrides: list[str], n_token_ids: int | None, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders[kind], *overrides, *offloads(overrides, STATES), ranks=ranks)
    first, *others = pool.run(ranks, offload_jobs.log_probs, config, SEQUENCES, n_token_ids)
    assert all(other == first for other in others)
    for found, want in zip(first, wanted_log_probs(folders[kind], n_token_ids), strict=True):
        assert found == pytest.approx(want, abs=1e-4)


class TestOnGpu:
    @pytest.fixture(autouse=True)
    def _needs_gpu(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")

    @pytest.mark.gpu
    @pytest.mark.parametrize("overrides", [[], [BF16], FSDP, LORA], ids=["float32", "bfloat16", "fsdp", "LoRA"])
    def test_training_with_all_states_offloaded_is_bitwise_equal(
        self, overrides: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        deterministic = ["trainer.device=cuda", f"{MEGATRON}.transformer_impl=local", ASYNC]
        results = []
        for number, states in enumerate(((), STATES)):
            config = make_config(folders["qwen2"], *overrides, *deterministic, *offloads(overrides, states))
            path = tmp_path / str(number)
            results.append(pool.run(1, offload_jobs.train, config, BATCHES, path)[0])
        assert_equal(results[1], results[0])

    @pytest.mark.gpu
    @pytest.mark.parametrize("overrides", [[], [BF16], FSDP], ids=["float32", "bfloat16", "fsdp"])
    def test_allocated_memory_drops_by_size_of_states(
        self, overrides: list[str], pool: WorkerPool, larger_folder: Path
    ) -> None:
        options = ["trainer.device=cuda", f"{MEGATRON}.transformer_impl=local", *offloads(overrides, STATES)]
        config = make_config(larger_folder, *overrides, *options)
        drops = pool.run(1, offload_jobs.measure_gpu_memory, config, BATCHES[0])[0]
        assert {"params", "optimizer"} <= set(drops)  # FSDP has no gradients outside of an update
        for state, (n_bytes, drop, is_pinned) in drops.items():
            assert drop >= n_bytes and is_pinned, state
