"""Python imports this module at its start. It gives the process the simulated GPU."""

import ctypes
import os

# Before torch is imported: torch looks for the hooks of CUDA only once.
ctypes.CDLL(os.environ["SIMULATED_GPU_LIBRARY"])

from tests.gpu_paths.simulated_gpu import install  # noqa: E402

install.install()
