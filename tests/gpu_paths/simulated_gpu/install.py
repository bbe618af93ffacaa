"""Everything that makes PyTorch in this process use the simulated GPU."""

from __future__ import annotations

from tests.gpu_paths.simulated_gpu import collectives, cuda_module, kernels


def install() -> None:
    """Replace functions of PyTorch, once for each process. The library of ``device.cpp`` is loaded already."""
    cuda_module.replace_functions()
    kernels.register()
    collectives.accept_nccl()
