"""Checks on the workers of the run: weight sync, agreement of engine and actor, and the loss of a perfect teacher."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.checkpoints.folders import PROBE
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.cluster import Cluster
from recipe_gkd.cluster_start import start_cluster
from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.commands.plan.estimate import data_parallel_size
from recipe_gkd.config import Config
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import TRAINING, read_data_set
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.hybrid import Devices, open_devices, teacher_asleep
from recipe_gkd.hybrid.sync_probe import SyncProbe, mismatch_bound, probe_contexts, rounding_bound
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import read_student, with_model_path
from recipe_gkd.ray_cluster.connection import choose_device, connected_cluster
from recipe_gkd.rollout.limits import engine_length
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.teachers.hf_teacher import HfTeacher
from recipe_gkd.teachers.router import Teachers, open_teachers
from recipe_gkd.teachers.routes import read_routes
from recipe_gkd.weight_sync.model_check import UPDATE_METRIC, MismatchGuard
from teacher.records import TeacherSequence

MAX_LOSS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Data type of the actor -> largest loss in nats per token of a teacher with the student's own weights. The rounding of
a log-probability by 0.06 in bfloat16 is a KL divergence of half its square, 0.002."""
LEARNING_RATE = 1e-3
"""Large enough that a weight which an engine does not load changes its log-probabilities visibly."""
_MIN_PROMPTS, _MAX_PROMPTS, _MAX_RESPONSE = 4, 64, 64
_SCORE_TIMEOUT_S = 600.0
_TOP_K = 32
_N_UPDATES = 2


def live_findings(config: Config) -> Iterator[Finding]:
    """Start Ray and the workers of the run, and yield the findings. All processes end with the last one.

    Args:
        config: Configuration of a run that passed the checks before.
    """
    yield from findings_of("workers", partial(_check_all, config))


def _check_all(config: Config) -> Iterator[Finding]:
    student = read_student(config)
    run_folder = folder_of(config.trainer).absolute()
    data_set = read_data_set(config.data.train_files, config.data, TRAINING, config.data.train_max_samples)
    routes = read_routes(data_set, config)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        config = live_config(with_model_path(config, student.path), Path(folder))
        data = PromptData(data_set[:_MAX_PROMPTS], config.data, student.tokenizer)
        try:
            with open_teachers(config, routes) as teachers, connected_cluster(config):
                asyncio.run(_check_workers(config, student, data, teachers, run_folder, found))
        finally:
            yield from found


def live_config(config: Config, folder: Path) -> Config:
    """Return the configuration of updates on few prompts with short responses, which writes no checkpoint.

    Layout, data types, kernels and limits of the engines stay as in the run. The objective is forward KL alone with
    the tail as one outcome, which is 0 for equal distributions.

    Args:
        folder: Folder for the diagnosis of a failure.
    """
    settings, length = config.actor_rollout_ref, engine_length(config)
    data = replace(
        config.data,
        max_response_length=min(_MAX_RESPONSE, config.data.max_response_length),
        filter_overlong_prompts=True,
        shuffle=False,
    )
    gkd = replace(
        config.gkd,
        enable_teacher=True,
        max_loss_position=None,
        distill_loss_type="forward_kl",
        distill_loss_coef=1.0,
        distill_temperature=1.0,
        tail="bucket",
        use_rl_loss=False,
        sft_share=0.0,
        warmup_steps=0,
        custom_loss=replace(config.gkd.custom_loss, path=None, name=None),
        position_weights=None,
        position_weights_key=None,
    )
    rollout = replace(settings.rollout, max_model_len=length, n=1, temperature=1.0, top_p=1.0, top_k=-1)
    profile = replace(config.trainer.profile, steps=[])
    trainer = replace(config.trainer, save_freq=-1, best_metric=None, default_local_dir=str(folder), profile=profile)
    optim = replace(settings.actor.optim, lr=LEARNING_RATE, lr_warmup_steps=0, lr_decay_style="constant")
    settings = replace(settings, rollout=rollout, actor=replace(settings.actor, optim=optim))
    return replace(config, data=data, gkd=gkd, trainer=trainer, actor_rollout_ref=settings)


async def _check_workers(
    config: Config, student: Student, data: PromptData, teachers: Teachers, run_folder: Path, found: list[Finding]
) -> None:
    """Start the workers, run each check on them, and add the findings to ``found``."""
    device = choose_device(config.trainer.device)
    config = with_data_types(config, device)
    started_at = time.monotonic()
    async with (
        teacher_asleep(config, teachers),
        start_cluster(config, device, total_steps=_N_UPDATES, stop_token_ids=(), n_tokens=student.n_tokens) as cluster,
    ):
        names = ", ".join(sorted(set(cluster.actor_devices)))
        text = f"{len(cluster.actors)} actor ranks on {names}, {len(cluster.rollouts)} rollout workers"
        found.append(Finding("workers", "ok", f"{text}, started in {time.monotonic() - started_at:.0f} s"))
        found.append(await _shared_folder_finding(cluster, run_folder))
        no_guard = MismatchGuard(None, 1, ())  # its differences are findings
        devices = open_devices(config, cluster, teachers, data.ids, no_guard)
        try:
            await _check_model(cluster, devices, config, student, data, found)
        finally:
            await devices.close()


async def _check_model(
    cluster: Cluster, devices: Devices, config: Config, student: Student, data: PromptData, found: list[Finding]
) -> None:
    """Sync weights, train, and sync the changed weights; compare the engines with the actor after each sync.

    The first comparison alone proves little: engines have loaded the same folder as the actor, so a weight that the
    sync does not reach is equal.
    """
    started_at = time.monotonic()
    await devices.sync(0)
    found.append(Finding("weight sync", "ok", f"all weights in {time.monotonic() - started_at:.2g} s"))
    async with devices.turn("generate"):
        pairs = await _generate(cluster, config, data)
    samples = await in_thread(_score, student, pairs)
    if not samples:
        found.append(Finding("loss", "skipped", "all sampled responses are empty"))
        return
    async with devices.turn("update"):
        first = await _update(cluster, samples, 0)
        await _update(cluster, [_with_other_teacher(sample) for sample in samples], 1)
    await devices.sync(_N_UPDATES)
    probe = SyncProbe(config, cluster, probe_contexts(data.ids, config))
    async with devices.turn("generate"):
        sampled = await probe.sample(_N_UPDATES)
    async with devices.turn("update"):
        changed = await probe.compare(sampled, _N_UPDATES)
    differences = {"the folder's weights": first[UPDATE_METRIC]}
    differences |= {f"{label} after an update": difference for label, difference in changed.items()}
    bound = mismatch_bound(config, cluster)
    found.append(mismatch_finding(differences, rounding_bound(config, cluster) if bound is None else bound))
    found.append(loss_finding(first, config.actor_rollout_ref.actor.dtype))


async def _update(cluster: Cluster, samples: list[Sample], step: int) -> dict[str, float]:
    batch = ReadyBatch(step=step, epoch=0.0, dispatched_at=time.monotonic(), samples=samples)
    return await cluster.update(batch)


def _with_other_teacher(sample: Sample) -> Sample:
    """Return the sample with the teacher's ids in reverse order, which gives its own student a large loss."""
    top_k = sample.top_k
    return replace(sample, teacher=replace(top_k, ids_TK=np.ascontiguousarray(top_k.ids_TK[:, ::-1])))


async def _shared_folder_finding(cluster: Cluster, folder: Path) -> Finding:
    """Check that all actor ranks see the run folder. A folder that does not exist yet is checked at its parent."""
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    with tempfile.NamedTemporaryFile(dir=existing, prefix=PROBE) as probe:
        phase = "look for the run folder"
        found = await cluster.actors.call(ActorWorker.path_exists, probe.name, timeout_s=60, phase=phase)
    unable = [cluster.actors.label(rank) for rank, exists in enumerate(found) if not exists]
    if unable:
        return Finding(
            "shared folder", "problem",
            f"{', '.join(unable)} cannot see {existing} of this machine; set trainer.default_local_dir to a folder on "
            "a disk that all nodes share",
        )  # fmt: skip
    return Finding("shared folder", "ok", f"all actor ranks see {existing}")


async def _generate(cluster: Cluster, config: Config, data: PromptData) -> list[tuple[Prompt, Response]]:
    """Return prompts with sampled responses, the same number from each rollout worker."""
    n_workers = len(cluster.rollouts)
    wanted = max(_MIN_PROMPTS, data_parallel_size(config), n_workers)
    prompts = [data.prompt(uid % len(data), uid) for uid in range(wanted)]

    async def of_worker(rank: int) -> list[Response]:
        stream = cluster.generate(data, rank, prompts[rank::n_workers], 0)
        return [response async for responses in stream for response in responses]

    by_worker = await asyncio.gather(*(of_worker(rank) for rank in range(n_workers)))
    responses = {response.uid: response for some in by_worker for response in some}
    return [(prompt, responses[prompt.uid]) for prompt in prompts]


def _score(student: Student, pairs: Sequence[tuple[Prompt, Response]]) -> list[Sample]:
    """Return the samples with the scores of the student's own weights, computed by transformers on the CPU."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    scored_pairs = [pair for pair in pairs if len(pair[1].ids)]
    teacher = HfTeacher(str(student.path), top_k=min(_TOP_K, student.n_tokens), device="cpu")
    try:
        sequences = [
            TeacherSequence(np.concatenate([prompt.ids, response.ids]), len(prompt.ids))
            for prompt, response in scored_pairs
        ]
        results = teacher.submit(sequences, _SCORE_TIMEOUT_S).result(_SCORE_TIMEOUT_S)
    finally:
        teacher.close()
    return [
        Sample(
            prompt=prompt,
            response=response,
            teacher=TeacherTopK(
                logps_TK=scored.topk_logps_TK, ids_TK=scored.topk_ids_TK, sampled_logps_T=scored.sampled_logps_T
            ),
        )
        for (prompt, response), scored in zip(scored_pairs, results, strict=True)
    ]


def mismatch_finding(differences: Mapping[str, float], bound: float) -> Finding:
    """Return the agreement of the engines' log-probabilities with the actor's.

    Args:
        differences: Mean absolute difference of the log-probabilities of sampled tokens in nats, by weights.
        bound: Largest difference that is expected.
    """
    listed = ", ".join(f"{name} {difference:.2g}" for name, difference in differences.items())
    text = f"mean difference of the log-probabilities in engine and actor: {listed} nats, at most {bound:g} is expected"
    if all(difference <= bound for difference in differences.values()):  # false for NaN
        return Finding("rollout mismatch", "ok", text)
    return Finding(
        "rollout mismatch", "problem",
        f"{text}; the engine computes another model than the actor: use one dtype for actor_rollout_ref.rollout.dtype "
        "and the actor, compare rope_scaling and tie_word_embeddings in the model folder's config.json with its "
        "weights, check the versions above, and run python -m recipe_gkd gpu_smoke",
    )  # fmt: skip


def loss_finding(metrics: Mapping[str, float], dtype: str) -> Finding:
    """Return the loss of a teacher with the student's weights, which must be 0 up to rounding.

    Args:
        metrics: Metrics of the update.
        dtype: Data type of the actor.
    """
    loss, bound = metrics["actor/distill_loss"], MAX_LOSS[dtype]
    text = f"loss with the student as its own teacher: {loss:.2g}, less than {bound:g} is expected"
    if math.isfinite(loss) and abs(loss) < bound:
        return Finding("loss", "ok", text)
    return Finding(
        "loss", "problem",
        f"{text}; the actor computes another model than transformers does from the same folder: check the versions "
        "above, try gkd.kernel_backend=torch and the other actor_rollout_ref.actor.strategy, and report it",
    )  # fmt: skip
