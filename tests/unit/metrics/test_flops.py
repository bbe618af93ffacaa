"""FLOPs of an update, computed by hand for models of two layers, and the utilization that follows."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.actor.megatron.model_dims import LayerAttention, ModelDims, Rope
from recipe_gkd.actor.student_dims import LatentAttention, MoEConfig
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.metrics.device_peaks import peak_tflops
from recipe_gkd.metrics.flops import forward_flops, update_flops
from recipe_gkd.metrics.utilization import ActorUtilization
from tests._support.tiny_models import make_config

DENSE = ModelDims(
    family="qwen3",
    layers=2,
    hidden=8,
    ffn=20,
    heads=4,
    kv_heads=2,
    head_dim=3,  # heads x head_dim differs from hidden
    vocab_size=100,
    tied=True,
    qkv_bias=False,
    qk_norm="head",
    norm_eps=1e-6,
    max_positions=64,
    ropes=(Rope(width=3, theta=1e4),),
)
MOE = MoEConfig(layers=(False, True), experts=6, top_k=2, ffn=5, normalized=True, shared_ffn=7)


class TestUpdateFlops:
    def test_flops_of_two_dense_layers_equal_those_by_hand(self) -> None:
        # Sequences of 3 and 2 tokens: 5 tokens. Forward pass of one layer:
        #   query, key, value: [5, 8] x [8, (4 + 2 x 2) x 3 = 24]   2 x 5 x 8 x 24 = 1920
        #   output projection: [5, 12] x [12, 8]                    2 x 5 x 12 x 8 =  960
        #   gate, up, down:    3 products with 8 x 20           3 x 2 x 5 x 8 x 20 = 4800
        #   attention: 1 + 2 + 3 and 1 + 2 = 9 pairs of a query and a key, 4 heads, scores and values of 3 channels:
        #                                                        2 x 2 x 9 x 4 x 3 =  432
        # Two layers: 2 x (1920 + 960 + 4800 + 432) = 16224. Output layer on 4 rows: 2 x 4 x 8 x 100 = 6400.
        assert forward_flops(DENSE, [3, 2], 4) == 16224 + 6400 == 22624
        assert update_flops(DENSE, [3, 2], 4) == 3 * 22624

    def test_flops_of_moe_layer_count_router_selected_experts_and_shared_expert(self) -> None:
        # The second layer's 4800 of the dense feed-forward is replaced, for 5 tokens:
        #   router: 2 x 5 x 8 x 6 = 480;  2 of 6 experts: 2 x 3 x 2 x 5 x 8 x 5 = 2400
        #   shared expert: 3 x 2 x 5 x 8 x 7 = 1680;  its gate: 2 x 5 x 8 = 80
        dims = dataclasses.replace(DENSE, moe=MOE)
        assert forward_flops(dims, [3, 2], 4) == 22624 - 4800 + 480 + 2400 + 1680 + 80

    def test_flops_of_attention_depend_on_sequences_not_on_packing(self) -> None:
        assert forward_flops(DENSE, [3, 2], 0) == forward_flops(DENSE, [3], 0) + forward_flops(DENSE, [2], 0)
        # One sequence of 5 has 15 pairs instead of 9.
        assert forward_flops(DENSE, [5], 0) - forward_flops(DENSE, [3, 2], 0) == 2 * 4 * 4 * 3 * (15 - 9)

    def test_flops_of_windows_count_pairs_within_them(self) -> None:
        # A sequence of 5 with a window of 2 has 1 + 2 + 2 + 2 + 2 = 9 pairs instead of 15.
        dims = dataclasses.replace(DENSE, attention=(LayerAttention(window=2), LayerAttention()))
        assert forward_flops(DENSE, [5], 0) - forward_flops(dims, [5], 0) == 4 * 4 * 3 * (15 - 9)
        assert forward_flops(dims, [2, 1], 0) == forward_flops(DENSE, [2, 1], 0)

    @pytest.mark.parametrize("q_rank", [None, 5])
    def test_flops_of_latent_attention_equal_those_of_its_matrices(self, q_rank: int | None) -> None:
        latent = LatentAttention(q_rank=q_rank, kv_rank=6, nope=2, rope=1, value=4)
        dims = dataclasses.replace(DENSE, kv_heads=0, head_dim=0, latent=latent)
        queries = 8 * 12 if q_rank is None else 8 * 5 + 5 * 12
        weights = queries + 8 * (6 + 1) + 6 * 4 * (2 + 4) + 4 * 4 * 8 + 3 * 8 * 20
        pair = 2 * 4 * (3 + 4)
        assert forward_flops(dims, [2], 0) == 2 * (2 * 2 * weights + 3 * pair)

    def test_flops_without_sequences_are_zero(self) -> None:
        assert update_flops(DENSE, [], 0) == 0


class TestPeakTflops:
    @pytest.mark.parametrize(
        ("name", "bfloat16", "float32"),
        [
            ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
            ("NVIDIA H100 PCIe", 756.0, 51.2),
            ("NVIDIA H100 NVL", 835.5, 60.0),
            ("NVIDIA H200", 989.4, 66.9),
            ("NVIDIA B200", 2250.0, 75.0),
            ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
            ("NVIDIA L40S", 362.0, 91.6),
            ("NVIDIA L4", 121.0, 30.3),
            ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
            ("NVIDIA RTX 6000 Ada Generation", 364.2, 91.1),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
            ("cpu", None, None),
        ],
    )
    def test_peak_of_device_name(self, name: str, bfloat16: float | None, float32: float | None) -> None:
        assert (peak_tflops(name, "bfloat16"), peak_tflops(name, "float32")) == (bfloat16, float32)


class TestActorUtilization:
    @pytest.fixture
    def config_of(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr("recipe_gkd.metrics.utilization.read_student_dims", lambda *_: DENSE)
        return lambda *overrides: make_config(Path("none"), *overrides)

    def test_mfu_is_flops_over_time_and_peak_of_pool(self) -> None:
        samples = [
            make_sample(uid, prompt, [3, 4], [[-1.0]] * 2, [[0]] * 2) for uid, prompt in enumerate(([1, 2], [5]))
        ]
        metrics = ActorUtilization(DENSE, 2e-6).metrics(samples, update_s=0.5)
        # Inputs of 3 and 2 tokens, 4 response tokens; 2e6 FLOP/s for half a second.
        assert metrics == {"perf/mfu/actor": pytest.approx(3 * 22624 / 1e6)}

    def test_mfu_ignores_samples_without_response(self) -> None:
        sample, empty = make_sample(0, [1, 2], [3], [[-1.0]], [[0]]), make_sample(1, [1] * 9, [], [], [])
        utilization = ActorUtilization(DENSE, 1.0)
        assert utilization.metrics([sample, empty], 1.0) == utilization.metrics([sample], 1.0)

    def test_peak_of_pool_is_sum_over_devices(self, config_of: Any) -> None:
        sample = make_sample(0, [1, 2], [3], [[-1.0]], [[0]])
        config = config_of("actor_rollout_ref.actor.megatron.dtype=bfloat16")
        found = []
        for names in (["NVIDIA H100 PCIe"], ["NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB"]):
            utilization = ActorUtilization.of(config, names)
            assert utilization is not None
            found.append(utilization.metrics([sample], 1.0)["perf/mfu/actor"])
        assert found[1] == pytest.approx(found[0] * 756 / (756 + 312))

    def test_peak_is_that_of_the_data_type_of_the_backend(self, config_of: Any) -> None:
        """The base configuration of these tests has float32 for Megatron."""
        sample = make_sample(0, [1, 2], [3], [[-1.0]], [[0]])
        found = []
        for overrides in ([], ["actor_rollout_ref.actor.strategy=fsdp"]):
            utilization = ActorUtilization.of(with_data_types(config_of(*overrides), "cuda"), ["NVIDIA H100 PCIe"])
            assert utilization is not None
            found.append(utilization.metrics([sample], 1.0)["perf/mfu/actor"])
        assert found[0] == pytest.approx(found[1] * 756 / 51.2)

    def test_model_of_unknown_flops_is_reported_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        config = make_config(tmp_path, "actor_rollout_ref.actor.strategy=fsdp", "trainer.device_peak_tflops=1")
        with caplog.at_level(logging.INFO, "recipe_gkd"):
            assert ActorUtilization.of(config, ["cpu"]) is None
        assert caplog.messages == ["perf/mfu/actor is left out: the FLOPs of a 'gpt2' model are unknown"]

    def test_unknown_device_is_reported_once_unless_key_is_set(
        self, config_of: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            assert ActorUtilization.of(config_of(), ["cpu", "cpu"]) is None
        (message,) = caplog.messages
        assert "the peak rate of cpu is unknown; set trainer.device_peak_tflops" in message
        utilization = ActorUtilization.of(config_of("trainer.device_peak_tflops=1e-3"), ["cpu", "cpu"])
        assert utilization is not None
        sample = make_sample(0, [1, 2], [3], [[-1.0]], [[0]])
        flops = update_flops(DENSE, [2], 1)
        assert utilization.metrics([sample], 1.0)["perf/mfu/actor"] == pytest.approx(flops / 2e9)
