"""Copy of a packed micro-batch to the device: the same tensors from pinned memory as from plain arrays."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.batch import staging
from recipe_gkd.actor.batch.context_parallel import shard_for_context
from recipe_gkd.actor.batch.device_batch import DeviceBatch, to_device
from recipe_gkd.actor.batch.host_arrays import ArrayPool
from recipe_gkd.actor.batch.packing import PackedBatch, pack
from recipe_gkd.actor.objective.loss_terms import GlobalDenominators
from recipe_gkd.actor.packed_row import attend_in_blocks
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import make_samples, without_empty

SAMPLES = without_empty(make_samples(20))
CPU = torch.device("cpu")


def packed_batch(samples: list[Sample], cp_size: int = 1) -> tuple[PackedBatch, dict[str, np.ndarray]]:
    packed = pack(samples, multiple_of=2)
    weights = GlobalDenominators.of(GlobalDenominators.counts(samples)).weights(packed, "seq-mean-token-mean")
    return shard_for_context(packed, weights, cp_rank=0, cp_size=cp_size)


def in_block(packed: PackedBatch, weights: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stage a micro-batch as for a GPU, but in memory that is not pinned."""
    empty, requested = torch.empty, []

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        requested.append(pin_memory)
        return empty(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", unpinned)
        patch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
        staged = staging.stage(packed, weights, torch.device("cuda", 3))
    assert requested == [True]
    return staged


def tensors_of(batch: DeviceBatch) -> dict[str, torch.Tensor]:
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    row = found.pop("row")
    found |= {f"weight {name}": weight_T for name, weight_T in found.pop("weights").items()}
    found |= {f"block {number}": block for number, block in enumerate(row.blocks)}
    if row.row_order is not None:
        found |= vars(row.row_order)
    return found | {name: getattr(row, name) for name in ("boundaries", "position_ids_N", "unpack_index_N")}


class TestStage:
    @pytest.mark.parametrize("samples", [SAMPLES, []], ids=["samples", "empty"])
    @pytest.mark.parametrize("cp_size", [1, 2])
    def test_stage_in_one_block_yields_the_same_tensors(
        self, monkeypatch: pytest.MonkeyPatch, samples: list[Sample], cp_size: int
    ) -> None:
        packed, weights = packed_batch(samples, cp_size)
        staged = in_block(packed, weights, monkeypatch)
        plain = tensors_of(to_device(staging.stage(packed, weights, CPU), CPU))
        copied = tensors_of(to_device(staged, CPU))
        assert plain.keys() == copied.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(tensor, copied[name], rtol=0, atol=0, equal_nan=True, msg=name)

    def test_stage_in_one_block_copies_once_without_blocking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        staged = in_block(*packed_batch(SAMPLES), monkeypatch)
        copies: list[tuple[Any, ...]] = []

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            copies.append((tensor.dtype, *args, kwargs))
            return tensor

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", to)
            staged.copy_to(torch.device("cuda", 3))
        first, *widenings = copies
        assert first == (torch.uint8, torch.device("cuda", 3), {"non_blocking": True})
        assert all(isinstance(dtype, torch.dtype) for _, dtype, _ in widenings)
        narrow = {name: tensor.dtype for name, tensor in staged.tensors.items()}
        assert narrow["ids_TK"] == narrow["token_ids_N"] == narrow["block/0"] == torch.int32

    def test_stage_widens_indices_and_float16(self) -> None:
        halves = [
            replace(each, teacher=replace(each.teacher, logps_TK=each.teacher.logps_TK.astype(np.float16)))
            for each in SAMPLES
        ]
        packed, weights = packed_batch(halves)
        pool = ArrayPool()
        batch = to_device(staging.stage(packed, weights, CPU, allocate=pool.empty), CPU)
        assert batch.logps_TK.dtype == torch.float32 and torch.equal(
            batch.logps_TK, torch.tensor(packed.logps_TK).float()
        )
        for name in ("ids_TK", "token_ids_1N", "loss_rows_T", "response_ids_T", "sequence_T", "overlap_rows_R"):
            assert getattr(batch, name).dtype == torch.int64, name
        assert batch.row.boundaries.dtype == torch.int32
        assert batch.row.boundaries.tolist() == np.cumsum([0, *packed.lengths]).tolist()

    @pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 4, 9, 1]])
    def test_stage_yields_rows_with_which_attention_equals_each_sequence_alone(self, lengths: list[int]) -> None:
        """The gradients do, too. Equally long sequences are not gathered."""
        samples = [
            make_sample(uid, [1, 2], [3] * (n - 1), np.zeros((n - 1, 0)), np.zeros((n - 1, 0)))
            for uid, n in enumerate(lengths)
        ]
        row = to_device(staging.stage(pack(samples, with_teacher=False), {}, CPU), CPU).row
        assert row.uniform_length == (5 if lengths == [5, 5, 5] else None)
        assert (row.unpack_index_N is None) == (not row.blocks) == (lengths == [5, 5, 5])
        torch.manual_seed(0)
        query, key, value = (torch.randn(sum(lengths), heads, 4, requires_grad=True) for heads in (4, 2, 2))
        outputs = []
        for each in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1) for x in each)
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
        alone = torch.cat(outputs)
        packed = attend_in_blocks(query, key, value, row, None)
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
        gradients = [torch.autograd.grad(output.sin().sum(), (query, key, value)) for output in (packed, alone)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("attention", "names"),
        [
            (AttentionKernel.SDPA_BLOCKS, {"block/", "unpack_index_N", "by_rank_N", "by_sequence_N"}),
            (AttentionKernel.STORED_SCORES, {"block/", "unpack_index_N", "by_rank_N", "by_sequence_N"}),
            (AttentionKernel.VARLEN, {"by_rank_N", "by_sequence_N"}),
            (AttentionKernel.TE_FUSED, set()),
        ],
    )
    def test_stage_has_only_the_row_indices_that_the_kernel_reads(
        self, attention: AttentionKernel, names: set[str]
    ) -> None:
        packed, weights = packed_batch(SAMPLES, cp_size=2)
        staged = staging.stage(packed, weights, CPU, attention=attention)
        optional = ("block/", "unpack_index_N", "by_rank_N", "by_sequence_N")
        assert {name for name in optional if any(each.startswith(name) for each in staged.tensors)} == names
        row = to_device(staged, CPU).row
        assert (row.row_order is None) == (attention is AttentionKernel.TE_FUSED)
        assert row.boundaries.tolist() == np.cumsum([0, *packed.lengths]).tolist()

    def test_stage_counts_positions_in_buckets(self) -> None:
        positions_T = np.array([0, 31, 32, 127, 128, 5000], np.int32)
        assert staging._position_buckets(positions_T).tolist() == [0, 0, 1, 1, 2, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: pinned memory and asynchronous copies")
class TestStageOnGpu:
    def test_stage_reuses_pinned_memory_only_after_its_copy(self) -> None:
        """The stream is busy when a block is released, so that its copy has not started when the next one is filled."""
        device = torch.device("cuda", 0)
        busy = torch.randn(8192, 8192, device=device)
        batches, wanted, addresses = [], [], set()
        for number in range(12):
            samples = SAMPLES[number % 3 :] * 20
            packed, weights = packed_batch(samples)
            for _ in range(4):
                busy = busy @ busy / 1e4
            staged = staging.stage(packed, weights, device)
            assert staged.block is not None and staged.block.is_pinned()
            addresses.add(staged.block.data_ptr())
            batches.append(to_device(staged, device))
            wanted.append(to_device(staging.stage(packed, weights, CPU), CPU))
            del staged
        for batch, want in zip(batches, wanted, strict=True):
            assert torch.equal(batch.ids_TK.cpu(), want.ids_TK) and torch.equal(batch.logps_TK.cpu(), want.logps_TK)
        torch.cuda.synchronize()
        again = staging.stage(*packed_batch(SAMPLES * 20), device)
        assert again.block is not None and again.block.data_ptr() in addresses
