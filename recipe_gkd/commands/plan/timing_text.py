"""Predicted times of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from recipe_gkd.commands.plan.timing import TimingEstimate

_TRANSPORTS = {"ipc": "CUDA IPC", "node": "NCCL within a node", "network": "NCCL between nodes"}


def timing_text(timing: TimingEstimate) -> str:
    """Return the predicted times, the steps of the schedules and the assumptions."""
    return "\n".join([*_stage_lines(timing), *_schedule_lines(timing), *_assumption_lines(timing)])


def _stage_lines(timing: TimingEstimate) -> Iterator[str]:
    device, work, stages, generation = timing.device, timing.workload, timing.stages, timing.generation
    rates = f"{device.flops / 1e12:.0f} TFLOP/s, {device.bandwidth / 1e12:.2f} TB/s"
    yield f"predicted times on {device.name} ({rates}); no time below was measured"
    yield (
        f"  step: {work.n_responses} responses of {work.response_tokens} tokens (mean) after prompts of "
        f"{work.prompt_tokens}"
    )
    parts = {"prefill": generation.prefill, "decode": generation.decode, "stragglers": generation.stragglers}
    engines = _number(timing.n_engines, "engine")
    if generation.in_flight:
        yield _stage("generation", stages.latency, parts) + (
            f"; {engines}, {generation.in_flight} in flight each, decoding bound by {generation.decode_bound}"
        )
    else:
        yield "  generation: none, all responses are reference responses"
    if timing.n_teacher_gpus:
        teacher_gpus = _number(timing.n_teacher_gpus, "GPU")
        yield _stage("teacher", stages.teacher, timing.teacher) + f"; {teacher_gpus}, wire overlaps"
    else:
        yield _stage("recorded scores", stages.teacher, timing.teacher) if stages.teacher else "  teacher: none"
    actor_gpus = _number(timing.n_actor_gpus, "GPU")
    yield _stage("update", stages.update, timing.update) + f"; {actor_gpus}, MFU {100 * timing.update_mfu:.1f} %"
    yield f"  weight sync: {stages.sync:.3f} s over {_TRANSPORTS[timing.transport]}"


def _schedule_lines(timing: TimingEstimate) -> Iterator[str]:
    for schedule in timing.schedules:
        yield (
            f"  {schedule.name}: {schedule.step_s:.1f} s per step (bound {schedule.bound_s:.1f} s), "
            f"{schedule.response_tokens_per_s:,.0f} response tokens/s, limited by {schedule.limited_by}"
            + (" (configured)" if schedule.is_configured else "")
        )


def _assumption_lines(timing: TimingEstimate) -> Iterator[str]:
    yield "  assumptions:"
    for each in timing.assumptions:
        origin = "measured" if each.is_measured else "estimate"
        yield f"    {each.name} = {each.value:g}: {each.text} ({origin})"


def _stage(name: str, seconds: float, parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{part} {value:.2f}" for part, value in parts.items() if value)
    return f"  {name}: {seconds:.2f} s ({listed})"


def _number(count: int, unit: str) -> str:
    return f"{count} {unit}" + ("" if count == 1 else "s")
