"""vLLM's V2 model runner with async scheduling on a CPU: the runner that vLLM selects on a GPU.

The CPU build of vLLM 0.32 contains this runner, but does not use it without a Triton backend for the CPU. Tests with
the V1 runner show neither its kernels nor a batch in flight during a pause. Two parts of vLLM are changed:

- ``triton_utils/importing.py`` finds a Triton backend `cpu`. vLLM then selects the V2 runner by its own rule. The
  backend is never called, because ``TRITON_INTERPRET`` makes Triton interpret all kernels.
- ``platforms/cpu.py`` keeps async scheduling, which it disables otherwise. vLLM enables it on a GPU by default.

The rest is the code of a GPU: the input batch, block tables, sampler and prompt log-probabilities of
``v1/worker/gpu/``, and the queue of batches of ``v1/engine/core.py``. Kernels of attention and linear layers are those
of the CPU. There are no CUDA graphs, streams or NCCL.

Lifecycle of a script that :func:`run_script` runs in a separate process::

    v2_runner.add_triton_backend()  # at the top level: spawned tensor ranks import the script again

    def main(result, *arguments):
        v2_runner.keep_async_scheduling()
        ...                             # make an engine, and write the JSON file ``result``

    if __name__ == "__main__":
        main(*sys.argv[1:])
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipe_gkd.commands.gpu_smoke.isolation import last_lines, run_with_deadline
from recipe_gkd.rollout.environment import worker_environment
from tests._support.waiting import PATIENCE_S

VARIABLES = {**worker_environment("cpu"), "TRITON_INTERPRET": "1"}
"""Environment variables of a script. Triton and vLLM read them when they are imported."""
_LOG_LINES = 40


def run_script(module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m module RESULT ARGUMENTS``, and end all processes that it has started.

    Args:
        module: Script that writes the JSON file RESULT.
        *arguments: Further arguments of the script.

    Returns:
        Content of the result.
    """
    # The temporary folder of the script has vLLM's sockets, whose paths are too long in a folder of pytest.
    with tempfile.TemporaryDirectory(prefix="v2-runner-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", module, str(result), *map(str, arguments)]
        status = run_with_deadline(command, variables=VARIABLES, log=log, deadline_s=PATIENCE_S)
        ending = f"exceeded {PATIENCE_S:g} s" if status is None else f"ended with status {status}"
        assert status == 0, "\n".join([f"{module} {ending}", *last_lines(log, _LOG_LINES)])
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def add_triton_backend() -> None:
    """Make Triton list a backend for the CPU. Call this before vLLM is imported, in each process that imports it.

    Without ``TRITON_INTERPRET`` it has no effect: tests import the scripts too, and Triton compiles in their process.
    """
    if "TRITON_INTERPRET" not in os.environ:
        return
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]


def keep_async_scheduling() -> None:
    """Keep vLLM's default for async scheduling. Tensor ranks receive it with the configuration of the engine."""
    from vllm.platforms.cpu import CpuPlatform

    update_config = CpuPlatform.check_and_update_config

    def update_except_scheduling(config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        update_config(config)
        config.scheduler_config.async_scheduling = chosen

    CpuPlatform.check_and_update_config = staticmethod(update_except_scheduling)  # type: ignore[method-assign]


def describe(engine: Any) -> dict[str, Any]:
    """Return the properties of an ``LLMEngine`` that a test relies on."""
    config = engine.vllm_config.scheduler_config
    return {
        "V2 runner": engine.collective_rpc(_has_v2_runner),
        "async scheduling": config.async_scheduling,
        "chunked prefill": config.enable_chunked_prefill,
        "tokens of a step": config.max_num_batched_tokens,
    }


def batches_in_flight(engine: Any) -> int:
    """Return the number of batches whose results the engine has not read."""
    return len(engine.engine_core.engine_core.batch_queue or ())


def _has_v2_runner(worker: Any) -> bool:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return isinstance(worker.model_runner, GPUModelRunner)
