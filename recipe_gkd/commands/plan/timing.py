"""Predicted time of the stages of a step, computed from the configuration and the data sheet of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recipe_gkd.actor.fsdp.model_dims import read_causal_lm_dims
from recipe_gkd.actor.megatron.families import FAMILIES
from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.actor.student_dims import StudentDims, read_config_json
from recipe_gkd.commands.plan import assumptions as assumed
from recipe_gkd.commands.plan.assumptions import Assumption, list_assumptions
from recipe_gkd.commands.plan.estimate import RunEstimate
from recipe_gkd.commands.plan.rooflines import (
    DeviceRates,
    Engine,
    GenerationSeconds,
    Workload,
    generation_seconds,
    scoring_seconds,
)
from recipe_gkd.commands.plan.update_timing import model_flops, n_actor_ranks, update_parts
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.config.responses import ResponseCounts
from recipe_gkd.config.schema import Config
from recipe_gkd.config.staleness import MAX_STALENESS, staleness_bound
from recipe_gkd.config.weight_transport import weight_transport
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.memory_budget.actor_states import ITEM_BYTES
from recipe_gkd.memory_budget.slots import query_gpus
from recipe_gkd.metrics.advice.step_time_model import StageSeconds, step_bound, step_seconds, step_time_bounds
from recipe_gkd.metrics.device_peaks import MEMORY_TB_PER_S, PEAKS, memory_tb_per_s, peak_tflops
from recipe_gkd.model_files import find_model
from teacher.common.sizes import MIB

_GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class TeacherSetup:
    """Teacher of a prediction. The configuration of a run has only the address of its service.

    Attributes:
        n_gpus: Number of GPUs of all teacher workers together, of the same kind as the run's.
    """

    dims: StudentDims
    n_gpus: int


@dataclass(frozen=True, kw_only=True)
class ScheduleTiming:
    """Predicted step of a schedule.

    Attributes:
        name: Value of ``trainer.scheduler``.
        staleness: Maximum policy lag in optimizer steps.
        step_s: Expected step time in seconds: :func:`recipe_gkd.metrics.advice.step_time_model.step_seconds`.
        bound_s: :func:`recipe_gkd.metrics.advice.step_time_model.step_bound` in seconds.
        limited_by: Largest bound: ``rollout``, ``actor``, ``teacher`` or ``staleness`` (all stages in turn).
        response_tokens_per_s: Response tokens trained on per second.
        is_configured: True for the schedule of the configuration.
    """

    name: str
    staleness: int
    step_s: float
    bound_s: float
    limited_by: str
    response_tokens_per_s: float
    is_configured: bool


@dataclass(frozen=True, kw_only=True)
class TimingEstimate:
    """Predicted times of a run, in seconds.

    Attributes:
        device: Rates of the actor's GPUs.
        workload: Responses of a step.
        n_actor_gpus: Number of actor ranks.
        generation: Times of the engine with the most responses.
        n_teacher_gpus: Number of GPUs of the teacher, 0 if it scores no response.
        teacher: Parts of the teacher's time: ``forward``, ``top-k``, ``wire``, which overlaps with both, and ``read``,
            the scores of a recording.
        update: Parts of the update: ``passes``, ``optimizer``, ``offload``.
        update_mfu: Model FLOPs of the update over its time and the peak rate.
        transport: ``"ipc"``, ``"node"`` or ``"network"``.
        stages: Time of each stage.
        schedules: Steps by schedule.
        assumptions: Assumptions of the figures.
    """

    device: DeviceRates
    workload: Workload
    n_engines: int
    n_teacher_gpus: int
    n_actor_gpus: int
    generation: GenerationSeconds
    teacher: dict[str, float]
    update: dict[str, float]
    update_mfu: float
    transport: str
    stages: StageSeconds
    schedules: list[ScheduleTiming]
    assumptions: list[Assumption]


def estimate_timing(
    config: Config, estimate: RunEstimate, teacher: TeacherSetup | None, device_name: str | None
) -> TimingEstimate:
    """Return the predicted times of a run on GPUs.

    Args:
        config: Configuration of the run, whose model path is a folder.
        estimate: Figures of the same run.
        teacher: Teacher of the run, None if it scores no response.
        device_name: Name of the GPU as torch reports it; None for the GPU of this machine.

    Raises:
        ConfigError: The device is unknown or a CPU.
        ModelError: The FLOPs of the student or of the teacher are unknown.
    """
    if config.trainer.device == "cpu":
        what = "--timing predicts runs on GPUs; got trainer.device=cpu"
        raise ConfigError(what, remedy="set trainer.device=cuda", keys=("--timing", "trainer.device"))
    name = device_name or _gpu_name()
    config = with_data_types(config, "cuda")
    settings = config.actor_rollout_ref
    dims = read_student_dims(settings.model.path, config)
    for model in [dims] if teacher is None else [dims, teacher.dims]:
        ensure_flops_known(model)
    device, counts, workload = (
        device_rates(name, settings.actor.dtype),
        ResponseCounts.of(config),
        mean_workload(config),
    )
    generation, n_engines = _generation(config, estimate, dims, replace(workload, n_responses=counts.sampled), name)
    scoring = _teacher_seconds(config, estimate, workload, teacher, name)
    update, n_ranks = update_parts(config, dims, workload, device), n_actor_ranks(config)
    update_s, teacher_s = sum(update.values()), max(scoring["forward"] + scoring["top-k"], scoring["wire"])
    teacher_s = max(teacher_s, scoring["read"])  # the driver reads while the teacher scores
    transport = _transport(config)
    stages = StageSeconds(
        generate=generation.work,
        latency=generation.work + generation.stragglers,
        teacher=teacher_s,
        tail=teacher_s,
        update=update_s,
        sync=sync_seconds(estimate.sync_bytes, transport, settings.rollout.update_weights_bucket_megabytes),
    )
    return TimingEstimate(
        device=device,
        workload=workload,
        n_engines=n_engines,
        n_teacher_gpus=0 if teacher is None else teacher.n_gpus,
        n_actor_gpus=n_ranks,
        generation=generation,
        teacher=scoring,
        update=update,
        update_mfu=model_flops(config, dims, workload) / (update_s * n_ranks * device.flops),
        transport=transport,
        stages=stages,
        schedules=_schedules(config, stages, workload),
        assumptions=list_assumptions(settings.actor.strategy, transport, reads_recording=counts.recorded > 0),
    )


def read_teacher(config: Config, folder: str | None, n_gpus: int | None) -> TeacherSetup | None:
    """Return the teacher of a prediction, None if it scores no response.

    Args:
        folder: Folder or hub name of the teacher, of which ``config.json`` is read; None for
            ``actor_rollout_ref.teacher.model_path``.
        n_gpus: GPUs of all teacher workers; None for ``actor_rollout_ref.teacher.n_server_workers``, or else 1.

    Raises:
        ConfigError: No folder was given.
        ModelError: Its ``config.json`` cannot be read or is not supported.
    """
    if not ResponseCounts.of(config).scored:
        return None
    settings = config.actor_rollout_ref.teacher
    key = "--teacher-model" if folder else "actor_rollout_ref.teacher.model_path"
    given = folder or settings.model_path
    if given is None:
        remedy = "give a folder with its config.json: --teacher-model"
        raise ConfigError("--timing needs the size of the teacher", remedy=remedy, keys=("--teacher-model",))
    path = find_model(given, key)
    is_family = read_config_json(path).get("model_type") in FAMILIES
    dims: StudentDims = read_model_dims(path) if is_family else read_causal_lm_dims(path)
    return TeacherSetup(dims=dims, n_gpus=n_gpus or settings.n_server_workers or 1)


def device_rates(name: str, dtype: str) -> DeviceRates:
    """Return the peak rates of a GPU from its data sheet.

    Args:
        name: Name that torch reports.
        dtype: Data type of the matrix products.

    Raises:
        ConfigError: The device is unknown.
    """
    tflops, bandwidth = peak_tflops(name, "float32" if dtype == "float32" else "bfloat16"), memory_tb_per_s(name)
    if tflops is None or bandwidth is None:
        known = ", ".join(" ".join(words) for words in PEAKS if words in MEMORY_TB_PER_S)
        raise ConfigError(
            f"the peak rates of the device {name!r} are unknown; known: {known}",
            remedy="give a name with the words of a known one, such as --device-name 'NVIDIA H100 80GB HBM3'",
            keys=("--device-name",),
        )
    return DeviceRates(name=name, flops=tflops * 1e12, bandwidth=bandwidth * 1e12)


def mean_workload(config: Config) -> Workload:
    """Return the responses of a step with the assumed mean lengths.

    The spread of the lengths is left out, so attention, whose cost is quadratic in the length, is underestimated.
    """
    data, counts = config.data, ResponseCounts.of(config)
    return Workload(
        n_responses=counts.trained,
        prompt_tokens=math.ceil(data.max_prompt_length * assumed.MEAN_PROMPT_FRACTION),
        response_tokens=math.ceil(data.max_response_length * assumed.MEAN_RESPONSE_FRACTION),
        longest_response=data.max_response_length,
    )


def ensure_flops_known(dims: StudentDims) -> None:
    """Raise ModelError if the FLOPs of a model are unknown."""
    if problem := dims.flops_problem():
        raise ModelError(f"--timing cannot predict this model: {problem}", remedy="leave --timing out")


def sync_seconds(n_bytes: float, transport: str, bucket_megabytes: float) -> float:
    """Return the time of a weight sync, in seconds.

    Args:
        n_bytes: Bytes that each rollout worker receives.
        transport: ``"ipc"``, ``"node"`` or ``"network"``.
        bucket_megabytes: Size of a bucket in MiB.
    """
    if transport == "ipc":
        n_buckets = math.ceil(n_bytes / (bucket_megabytes * MIB))
        return n_buckets * assumed.IPC_BUCKET_S + n_bytes / (assumed.IPC_GB_PER_S * 1e9)
    rate = assumed.NODE_GB_PER_S if transport == "node" else assumed.NETWORK_GB_PER_S
    return n_bytes / (rate * 1e9) * assumed.SYNC_OVERHEAD


def _gpu_name() -> str:
    if not (names := query_gpus("name")):
        raise ConfigError(
            "this machine has no GPU whose name can be read",
            remedy="give it, such as --device-name 'NVIDIA H100 80GB HBM3'",
            keys=("--device-name",),
        )
    return names[0]


def _generation(
    config: Config, estimate: RunEstimate, dims: StudentDims, workload: Workload, device_name: str
) -> tuple[GenerationSeconds, int]:
    """Return the times of the engine with the most responses, and the number of engines."""
    rollout, (nodes, each) = config.actor_rollout_ref.rollout, config.rollout_pool
    n_engines = max(1, nodes * (each // rollout.tensor_model_parallel_size))
    limit = rollout.max_num_seqs
    if estimate.cached_tokens:
        limit = min(limit, estimate.cached_tokens // (workload.prompt_tokens + workload.response_tokens))
    engine = Engine(
        dims=dims,
        item=ITEM_BYTES.get(rollout.dtype, 2),
        n_gpus=rollout.tensor_model_parallel_size,
        max_in_flight=limit,
    )
    share = replace(workload, n_responses=math.ceil(workload.n_responses / n_engines))
    return generation_seconds(share, engine, device_rates(device_name, rollout.dtype)), n_engines


def _teacher_seconds(
    config: Config, estimate: RunEstimate, workload: Workload, teacher: TeacherSetup | None, device_name: str
) -> dict[str, float]:
    """Return the parts of the teacher's time."""
    counts = ResponseCounts.of(config)
    parts = {"forward": 0.0, "top-k": 0.0, "wire": 0.0, "read": 0.0}
    parts["read"] = counts.recorded * workload.response_tokens * assumed.RECORDED_TOKEN_S
    if teacher is not None:
        scored = replace(workload, n_responses=counts.scored)
        rates = device_rates(device_name, "bfloat16")
        parts["forward"], parts["top-k"] = scoring_seconds(scored, teacher.dims, rates, teacher.n_gpus)
        parts["wire"] = _wire_seconds(config, counts.scored * workload.response_tokens * estimate.token_bytes)
    return parts


def _wire_seconds(config: Config, n_bytes: float) -> float:
    n_workers = config.trainer.nnodes * config.actor_rollout_ref.teacher.scoring_workers_per_node
    rate = min(assumed.SCORING_WORKER_GB_PER_S * n_workers, assumed.NETWORK_GB_PER_S * config.trainer.nnodes)
    return n_bytes / (rate * 1e9)


def _transport(config: Config) -> str:
    """Return the transport. Two pools of one node each are on the same node if it has enough GPUs."""
    if weight_transport(config) == "ipc":
        return "ipc"
    nodes, each = config.rollout_pool
    n_gpus = n_actor_ranks(config) + (0 if config.actor_rollout_ref.hybrid_engine else nodes * each)
    return "node" if config.trainer.nnodes == nodes == 1 and n_gpus <= _GPUS_PER_NODE else "network"


def _schedules(config: Config, stages: StageSeconds, workload: Workload) -> list[ScheduleTiming]:
    trainer, settings = config.trainer, config.actor_rollout_ref
    lags = {str(trainer.scheduler): staleness_bound(trainer)}
    if not (settings.hybrid_engine or settings.teacher.sleep_between_batches):
        lags = {str(name): lag for name, lag in MAX_STALENESS.items()} | lags
    tokens = workload.n_responses * workload.response_tokens
    found = []
    for name, lag in lags.items():
        bounds = step_time_bounds(stages, lag, inflight=trainer.inflight_update)
        step_s = step_seconds(stages, lag, inflight=trainer.inflight_update)
        found.append(
            ScheduleTiming(
                name=name,
                staleness=lag,
                step_s=step_s,
                bound_s=step_bound(stages.generate, stages.teacher, stages.update, stages.sync, lag),
                limited_by=max(bounds, key=lambda cause: bounds[cause]),
                response_tokens_per_s=tokens / step_s,
                is_configured=name == trainer.scheduler,
            )
        )
    return found
