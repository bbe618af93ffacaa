"""Memory of a slot: the host's and its limits on a CPU, and the output of ``nvidia-smi``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipe_gkd.memory_budget import slots
from recipe_gkd.memory_budget.slots import nth_largest_gpu, slot_memory
from recipe_gkd.runtime import cgroup_memory


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
        monkeypatch.setattr(slots.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="143771\n143771\n"))
        assert slot_memory("cuda", 2) == 143771 << 20


class TestNthLargestGpu:
    def test_slots_use_the_largest_gpus(self) -> None:
        assert nth_largest_gpu("24564\n81559\n40960", 2) == 40960 << 20

    @pytest.mark.parametrize("lines", ["", "[N/A]", "81559"])
    def test_fewer_known_gpus_than_slots_are_unknown(self, lines: str) -> None:
        assert nth_largest_gpu(lines, 2) is None
