"""A CUDA device that is simulated on the host, so that the code for GPUs runs on a machine without one.

Device memory is host memory, and PyTorch's CPU kernels compute on it. All values are those of real tensors, so a test
compares them, which it cannot do with fake tensors. What a GPU would refuse or do late is simulated:

- A tensor of the host in an operator of the device is an error.
- ``copy_(..., non_blocking=True)`` has no effect on the host until something waits for its stream: the destination is
  zero before. From pinned memory it reads the source when the device needs the copy.
- ``torch.cuda.set_sync_debug_mode("error")`` makes a wait of the host for the device an error.
- The allocator counts bytes, and raises ``torch.OutOfMemoryError`` beyond a limit.
- ``nccl`` groups are gloo groups that accept device tensors. Handles of CUDA IPC name shared memory.
- A process uses one of four GPUs: the one that it selects with ``torch.cuda.set_device``.

Not simulated: the order of kernels on several streams (each runs at once), CUDA graphs, fused kernels of attention
apart from ``varlen_attn`` (``kernels.py``), NCCL's own behavior, and the speed and rounding of a GPU. Triton kernels
run in Triton's interpreter if ``TRITON_INTERPRET`` is 1; otherwise PyTorch's kernels replace them, which is faster.

- ``device.cpp`` is the device: memory, streams and operators. ``build.py`` compiles it.
- ``cuda_module.py`` replaces functions of ``torch.cuda``, ``kernels.py`` adds operators, ``collectives.py`` groups.
- ``site/`` gives a Python process, and all that it starts, the device: see :func:`environment`.
- ``checks_of_device.py`` and ``checks_of_actor.py`` are tests that run on it, started by ``../test_simulated_gpu.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests._support.repository import REPO
from tests.gpu_paths.simulated_gpu.build import LIBRARY, library

_SITE = Path(__file__).with_name("site")


def environment() -> dict[str, str]:
    """Return environment variables with which Python processes have the simulated GPU from their start.

    Raises:
        RuntimeError: The device cannot be compiled.
    """
    return {
        LIBRARY: str(library()),
        "PYTHONPATH": os.pathsep.join([str(_SITE), str(REPO)]),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
