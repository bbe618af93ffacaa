"""Memory of a slot: the host's and its limits on a CPU, and the output of ``nvidia-smi``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipe_gkd.memory_budget import slots
from recipe_gkd.memory_budget.slots import nth_largest_gpu, query_gpus, slot_memory
from recipe_gkd.runtime import cgroup_memory

TWO_GPUS = "0, GPU-aa11, 81559\n1, GPU-bb22, 24564\n"


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, output: str, visible: str | None) -> list[tuple[str, ...]]:
    """Let ``nvidia-smi`` write a text, set CUDA_VISIBLE_DEVICES, and return the list of later commands."""
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr(slots.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return commands


class TestSlotMemory:
    def test_slots_of_a_cpu_share_the_memory_of_the_host(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(cgroup_memory, "CGROUPS", tmp_path)
        total = psutil.virtual_memory().total
        assert slot_memory("cpu", 2) == total // 2
        (tmp_path / "memory.max").write_text("max\n")
        assert slot_memory("cpu", 2) == total // 2
        (tmp_path / "memory.max").write_text("1000000\n")
        assert slot_memory("cpu", 4) == 250000

    def test_gpu_without_nvidia_smi_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert slot_memory("cuda", 1) is None

    def test_gpu_memory_is_read_from_nvidia_smi(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvidia_smi(monkeypatch, TWO_GPUS, visible=None)
        assert (slot_memory("cuda", 1), slot_memory("cuda", 2)) == (81559 << 20, 24564 << 20)

    def test_hidden_gpus_count_only_if_ray_may_have_hidden_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvidia_smi(monkeypatch, TWO_GPUS, visible="1")
        assert (slot_memory("cuda", 1), slot_memory("cuda", 2)) == (24564 << 20, None)
        assert slot_memory("cuda", 1, visible_only=False) == 81559 << 20


class TestQueryGpus:
    @pytest.mark.parametrize(
        ("visible", "found"),
        [
            (None, ["a", "b, large"]),
            ("1,0", ["b, large", "a"]),
            (" GPU-bb ", ["b, large"]),
            ("0,7,1", ["a"]),
            ("-1", []),
            ("", []),
            ("MIG-3c", ["a", "b, large"]),
        ],
    )
    def test_visible_gpus_are_found_in_one_query(
        self, visible: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands = nvidia_smi(monkeypatch, "0, GPU-aa11, a\n1, GPU-bb22, b, large\n", visible)
        assert query_gpus("name") == found
        assert [command[1] for command in commands] == ["--query-gpu=index,uuid,name"]


class TestNthLargestGpu:
    def test_slots_use_the_largest_gpus(self) -> None:
        assert nth_largest_gpu(["24564", "81559", "40960"], 2) == 40960 << 20

    @pytest.mark.parametrize("sizes", [[], ["[N/A]", "81559"], ["81559"]])
    def test_fewer_known_gpus_than_slots_are_unknown(self, sizes: list[str]) -> None:
        assert nth_largest_gpu(sizes, 2) is None
