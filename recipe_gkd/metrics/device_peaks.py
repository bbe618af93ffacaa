"""Peak rates of matrix products and of the memory by device, from the data sheets of the manufacturer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

# Words of the name that torch reports -> TFLOP/s in bfloat16 with float32 accumulation and without sparsity, and in
# float32 without TF32, which torch does not use by default. The first entry whose words are all in the name applies.
PEAKS: dict[tuple[str, ...], tuple[float, float]] = {
    ("GB300",): (2500.0, 80.0),
    ("GB200",): (2500.0, 80.0),
    ("B300",): (2250.0, 75.0),
    ("B200",): (2250.0, 75.0),
    ("GH200",): (989.4, 66.9),
    ("H200", "NVL"): (835.5, 60.0),
    ("H200",): (989.4, 66.9),
    ("H100", "PCIE"): (756.0, 51.2),
    ("H100", "NVL"): (835.5, 60.0),
    ("H100",): (989.4, 66.9),
    ("H800", "PCIE"): (756.0, 51.2),
    ("H800",): (989.4, 66.9),
    ("H20",): (148.0, 44.0),
    ("A100",): (312.0, 19.5),
    ("A800",): (312.0, 19.5),
    ("A30",): (165.0, 10.3),
    ("A10",): (125.0, 31.2),
    ("A40",): (149.7, 37.4),
    ("L40S",): (362.0, 91.6),
    ("L40",): (181.0, 90.5),
    ("L4",): (121.0, 30.3),
    ("RTX", "6000", "ADA"): (364.2, 91.1),
    ("RTX", "A6000"): (154.8, 38.7),
    ("RTX", "5090"): (209.5, 104.8),
    ("RTX", "4090"): (165.2, 82.6),
    ("RTX", "3090", "TI"): (80.0, 40.0),
    ("RTX", "3090"): (71.0, 35.6),
}

MEMORY_TB_PER_S: dict[tuple[str, ...], float] = {
    ("GB300",): 8.0,
    ("GB200",): 8.0,
    ("B300",): 8.0,
    ("B200",): 8.0,
    ("GH200", "144G"): 4.9,
    ("GH200",): 4.0,
    ("H200",): 4.8,
    ("H100", "PCIE"): 2.0,
    ("H100", "NVL"): 3.9,
    ("H100",): 3.35,
    ("H800", "PCIE"): 2.0,
    ("H800",): 3.35,
    ("H20",): 4.0,
    ("A100", "40GB"): 1.555,
    ("A100",): 2.0,
    ("A800", "40GB"): 1.555,
    ("A800",): 2.0,
    ("A30",): 0.933,
    ("A10",): 0.6,
    ("A40",): 0.696,
    ("L40S",): 0.864,
    ("L40",): 0.864,
    ("L4",): 0.3,
    ("RTX", "6000", "ADA"): 0.96,
    ("RTX", "A6000"): 0.768,
    ("RTX", "5090"): 1.792,
    ("RTX", "4090"): 1.008,
    ("RTX", "3090", "TI"): 1.008,
    ("RTX", "3090"): 0.936,
}
"""Words of the name -> bandwidth of the device memory in TB/s. The order is as in :data:`PEAKS`."""

OTHER_CHIPS = {"MIG", "LAPTOP", "D", "MAX"}
"""Words of the names of devices with fewer units than the one in the table."""


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the peak rate of a device in TFLOP/s, or None if it is unknown.

    Args:
        device_name: Name that torch reports, such as ``NVIDIA H100 80GB HBM3``.
        dtype: ``bfloat16`` or ``float32``.
    """
    rates = _find(PEAKS, device_name)
    return None if rates is None else rates[dtype != "bfloat16"]


def memory_tb_per_s(device_name: str) -> float | None:
    """Return the bandwidth of the device memory in TB/s, or None if it is unknown.

    Args:
        device_name: Name that torch reports, such as ``NVIDIA H100 80GB HBM3``.
    """
    return _find(MEMORY_TB_PER_S, device_name)


_Value = TypeVar("_Value")


def _find(table: Mapping[tuple[str, ...], _Value], device_name: str) -> _Value | None:
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if words & OTHER_CHIPS:
        return None
    return next((value for needed, value in table.items() if words.issuperset(needed)), None)
