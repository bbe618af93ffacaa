"""List of all checks: what each needs, its deadline, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.commands.gpu_smoke.outcome import Context
from recipe_gkd.rollout.environment import worker_environment as rollout_environment

MACHINE = "machine"
"""Name of the first check. It always runs, because it finds the number of GPUs."""
_MODULES = f"{__package__}."


@dataclass(frozen=True)
class Check:
    """Function of a check, with what it needs and its deadlines.

    Attributes:
        name: Name for ``--only``.
        function: Module of this package, and function in it, as ``module:function``. It takes a :class:`Context`, and
            returns one line about what was compared.
        title: Property that the check shows, for ``--list``.
        gpus: Number of GPUs that it needs on CUDA.
        packages: Packages that it needs: ``vllm``, ``ray``.
        deadline_s: Deadline on CUDA. Kernels may be compiled at first use.
        environment: Worker whose environment variables its process gets.
    """

    name: str
    function: str
    title: str
    gpus: int = 1
    packages: tuple[str, ...] = ()
    deadline_s: float = 300.0
    cpu_deadline_s: float = 120.0
    environment: Literal["megatron", "fsdp", "rollout", "plain"] = "megatron"

    def deadline(self, device: str) -> float:
        """Return the deadline on a device, in seconds."""
        return self.deadline_s if device == "cuda" else self.cpu_deadline_s

    def load(self) -> Callable[[Context], str]:
        """Import and return the function of the check."""
        module, _, name = self.function.partition(":")
        function: Callable[[Context], str] = getattr(import_module(_MODULES + module), name)
        return function

    def variables(self, device: str) -> dict[str, str]:
        """Return the environment variables that its process gets in addition to this process's."""
        offline = {"HF_HUB_OFFLINE": "1"}
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        worker: dict[str, str] = {}
        if self.environment in ("megatron", "fsdp"):
            worker = actor_environment(device, self.environment)
        elif self.environment == "rollout":
            worker = rollout_environment(device)
        return offline | on_cpu | worker

    def obstacle(self, device: str, n_gpus: int, installed: dict[str, Any]) -> str | None:
        """Return the reason why this check is not possible here, or None.

        Args:
            device: ``"cuda"`` or ``"cpu"``.
            installed: Versions of the packages, None if a package is not installed; see
                :func:`~recipe_gkd.commands.gpu_smoke.machine.versions`.
        """
        if device == "cuda" and n_gpus < self.gpus:
            found = "torch finds none" if not n_gpus else f"there is {n_gpus}"
            return f"needs {self.gpus} GPU{'s' if self.gpus > 1 else ''}, {found}"
        for package in self.packages:
            version = installed.get(package)
            if version is None:
                return f"{package} is not installed"
            if package == "vllm" and version.endswith("cpu") != (device == "cpu"):
                return f"the installed vLLM ({version}) is not for {'CUDA' if device == 'cuda' else 'CPUs'}"
        return None


_transport = partial(Check, cpu_deadline_s=300.0)
_rollout = partial(Check, packages=("vllm",), deadline_s=600.0, cpu_deadline_s=240.0, environment="rollout")
_training = partial(Check, packages=("vllm", "ray"), deadline_s=1200.0, cpu_deadline_s=300.0, environment="plain")

CHECKS = (
    Check(MACHINE, "machine:check_machine",
          "driver, compiler, headers, shared memory, disk space; a matrix product on each GPU",
          gpus=0, environment="plain"),
    Check("kernels", "loss_checks:check_kernels",
          "loss kernels (PyTorch, and Triton on a GPU) against float64: sums and gradients"),
    Check("output_layer", "loss_checks:check_output_layer",
          "float32 output layer and fused output layer against float64"),
    Check("actor", "actor_checks:check_actor",
          "an update of the actor in bfloat16, without and with the fused output layer, against float64"),
    Check("actor_float32", "actor_checks:check_actor_float32",
          "the same in float32, without Transformer Engine"),
    Check("actor_fsdp", "actor_checks:check_actor_fsdp",
          "the same in bfloat16 with the FSDP backend", environment="fsdp"),
    Check("actor_lora", "actor_checks:check_actor_lora",
          "loss of a new adapter (LoRA), and merged weights after an update", environment="fsdp"),
    Check("actor_offload", "actor_checks:check_actor_offload",
          "updates of an actor whose states are in host memory between them"),
    Check("actor_tp2", "actor_checks:check_actor_tp2",
          "the same update in bfloat16 with two tensor-parallel ranks and sequence parallelism", gpus=2),
    Check("checkpoint", "actor_checks:check_checkpoint",
          "weights, optimizer and next update after a checkpoint, in a new actor"),
    _transport("transport_ipc", "transport_checks:check_ipc",
               "weights through shared memory (CUDA IPC on one GPU): two processes"),
    _transport("transport_collective", "transport_checks:check_collective",
               "weights through NCCL (gloo on a CPU): two processes", gpus=2),
    _rollout("rollout", "rollout_checks:check_rollout",
             "a rollout engine after weight syncs, double-buffered and in place, equals freshly loaded ones"),
    _rollout("rollout_sleep", "rollout_checks:check_rollout_sleep",
             "a rollout engine after both sleep levels"),
    _rollout("rollout_tp2", "rollout_checks:check_rollout_tp2",
             "the checks of `rollout` with two tensor-parallel ranks", gpus=2, cpu_deadline_s=300.0),
    Check("teacher", "teacher_checks:check_teacher",
          "log-probabilities of a teacher service against transformers, and after a sleep",
          packages=("vllm",), deadline_s=600.0, cpu_deadline_s=180.0, environment="plain"),
    _training("training", "training_check:check_training",
              "the training command for a few steps, with a teacher service and a checkpoint", gpus=2),
    _training("training_hybrid", "training_check:check_training_hybrid",
              "the same on one device, which actor, rollout engine and teacher use in turn"),
)  # fmt: skip
BY_NAME = {check.name: check for check in CHECKS}
