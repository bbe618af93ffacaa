"""List of all checks: what each needs, its deadline, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.commands.gpu_smoke.outcome import Context
from recipe_gkd.rollout.environment import worker_environment as rollout_environment

MACHINE = "machine"
"""Name of the first check. It always runs, because it finds the number of GPUs."""
_MODULES = f"{__package__}."


@dataclass(frozen=True, kw_only=True)
class Check:
    """Function of a check, with what it needs and its deadlines.

    Attributes:
        name: Name for ``--only``.
        title: Property that the check shows, for ``--list``.
        function: Module of this package, and function in it, as ``module:function``. It takes a :class:`Context`, and
            returns one line about what was compared.
        gpus: Number of GPUs that it needs on CUDA.
        packages: Packages that it needs: ``vllm``, ``ray``.
        deadline_s: Deadline on CUDA. Kernels may be compiled at first use.
        environment: Worker whose environment variables its process gets.
    """

    name: str
    title: str
    function: str
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


CHECKS = (
    Check(
        name=MACHINE,
        title="driver, compiler, headers, shared memory, disk space; a matrix product on each GPU",
        function="machine:check_machine",
        gpus=0,
        environment="plain",
    ),
    Check(
        name="kernels",
        title="loss kernels (PyTorch, and Triton on a GPU) against float64: sums and gradients",
        function="loss_checks:check_kernels",
    ),
    Check(
        name="output_layer",
        title="float32 output layer and fused output layer against float64",
        function="loss_checks:check_output_layer",
    ),
    Check(
        name="actor",
        title="an update of the actor in bfloat16, without and with the fused output layer, against float64",
        function="actor_checks:check_actor",
    ),
    Check(
        name="actor_float32",
        title="the same in float32, without Transformer Engine",
        function="actor_checks:check_actor_float32",
    ),
    Check(
        name="actor_fsdp",
        title="the same in bfloat16 with the FSDP backend",
        function="actor_checks:check_actor_fsdp",
        environment="fsdp",
    ),
    Check(
        name="actor_lora",
        title="loss of a new adapter (LoRA), and merged weights after an update",
        function="actor_checks:check_actor_lora",
        environment="fsdp",
    ),
    Check(
        name="actor_offload",
        title="updates of an actor whose states are in host memory between them",
        function="actor_checks:check_actor_offload",
    ),
    Check(
        name="actor_tp2",
        title="the same update in bfloat16 with two tensor-parallel ranks and sequence parallelism",
        function="actor_checks:check_actor_tp2",
        gpus=2,
    ),
    Check(
        name="checkpoint",
        title="weights, optimizer and next update after a checkpoint, in a new actor",
        function="actor_checks:check_checkpoint",
    ),
    Check(
        name="transport_ipc",
        title="weights through shared memory (CUDA IPC on one GPU): two processes",
        function="transport_checks:check_ipc",
        cpu_deadline_s=60.0,
    ),
    Check(
        name="transport_collective",
        title="weights through NCCL (gloo on a CPU): two processes",
        function="transport_checks:check_collective",
        gpus=2,
        cpu_deadline_s=60.0,
    ),
    Check(
        name="rollout",
        title="a rollout engine after weight syncs, double-buffered and in place, equals freshly loaded ones",
        function="rollout_checks:check_rollout",
        packages=("vllm",),
        deadline_s=600.0,
        cpu_deadline_s=240.0,
        environment="rollout",
    ),
    Check(
        name="rollout_sleep",
        title="a rollout engine after both sleep levels",
        function="rollout_checks:check_rollout_sleep",
        packages=("vllm",),
        deadline_s=600.0,
        cpu_deadline_s=240.0,
        environment="rollout",
    ),
    Check(
        name="rollout_tp2",
        title="the checks of `rollout` with two tensor-parallel ranks",
        function="rollout_checks:check_rollout_tp2",
        gpus=2,
        packages=("vllm",),
        deadline_s=600.0,
        cpu_deadline_s=300.0,
        environment="rollout",
    ),
    Check(
        name="teacher",
        title="log-probabilities of a teacher service against transformers, and after a sleep",
        function="teacher_checks:check_teacher",
        packages=("vllm",),
        deadline_s=600.0,
        cpu_deadline_s=180.0,
        environment="plain",
    ),
    Check(
        name="training",
        title="the training command for a few steps, with a teacher service and a checkpoint",
        function="training_check:check_training",
        gpus=2,
        packages=("vllm", "ray"),
        deadline_s=1200.0,
        cpu_deadline_s=300.0,
        environment="plain",
    ),
    Check(
        name="training_hybrid",
        title="the same on one device, which actor, rollout engine and teacher use in turn",
        function="training_check:check_training_hybrid",
        packages=("vllm", "ray"),
        deadline_s=1200.0,
        cpu_deadline_s=300.0,
        environment="plain",
    ),
)
BY_NAME = {check.name: check for check in CHECKS}
