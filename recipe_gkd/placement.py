"""Where a worker really is, whatever it was promised."""

from __future__ import annotations

import os
import socket
from typing import Any


def where_am_i(device: str) -> dict[str, Any]:
    """`node`, `pid`, `devices` (the GPUs' unique ids, or none on a CPU) and `device` (for people) of this process."""
    place: dict[str, Any] = {"node": socket.gethostname(), "pid": os.getpid(), "devices": [], "device": "cpu"}
    if device == "cuda":
        import torch

        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        place["devices"] = [str(gpu.uuid) for gpu in gpus]
        place["device"] = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in gpus) or "no GPU"
    return place
