"""Runs of the published curves: what differs from the base, and in which order they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BASE = (
    "data.max_response_length=48",
    "actor_rollout_ref.teacher.top_k=64",
    "trainer.total_training_steps=24",
    "trainer.test_freq=8",
    "trainer.save_freq=12",
    "trainer.logger=[jsonl]",
)
"""Overrides of ``smollm2.yaml`` in every run: 24 steps of 16 responses with at most 48 tokens."""
N_PROMPTS = 24 * 16
"""Number of training prompts. Every run sees each of them once, in an order that depends on the seed."""
N_LOGPROBS = 256
"""Number of log-probabilities that the teacher service can return."""


@dataclass(frozen=True)
class Variant:
    """A configuration that is run with one or more seeds.

    Attributes:
        name: Name of the configuration, also of its folder.
        group: Figure that shows it; see :data:`GROUPS`.
        overrides: Keys that differ from :data:`BASE`.
        n_seeds: Number of seeds, starting with 1.
    """

    name: str
    group: str
    overrides: tuple[str, ...] = ()
    n_seeds: int = 1

    @property
    def arguments(self) -> list[str]:
        """Overrides of ``smollm2.yaml``."""
        return [*BASE, *self.overrides]


FORWARD_KL = "forward_kl"
"""Variant that all groups compare with: the defaults of the project."""
UNTRAINED = "untrained"
"""Name of the scores of the student before any training."""
GROUPS = {
    "objective": "Divergence of the loss",
    "source": "Whose responses are trained on",
    "top_k": "Number of log-probabilities k",
    "support": "Ids that the divergence compares one by one: the teacher's, the student's or both",
    "tail": "Treatment of the ids outside the top-k, with k = 8",
    "schedule": "Schedule",
    "sampled": "Loss on the sampled token only",
    "lora": "Low-rank adapters",
}
"""Title of each figure."""

_K8 = "actor_rollout_ref.teacher.top_k=8"
_J64 = "actor_rollout_ref.teacher.student_top_k=64"
_HALVES = ("actor_rollout_ref.teacher.top_k=32", "actor_rollout_ref.teacher.student_top_k=32")
_REVERSE_KL = ("gkd.distill_loss_type=reverse_kl",)
_N_STEP = ("trainer.scheduler=n_step_off", "trainer.max_staleness=4")
VARIANTS = (
    Variant(FORWARD_KL, "objective", n_seeds=3),
    Variant("reverse_kl", "objective", _REVERSE_KL, n_seeds=3),
    Variant("jsd", "objective", ("gkd.distill_loss_type=jsd",), n_seeds=3),
    Variant("sequence_kd", "source", ("gkd.sft_share=1", "gkd.enable_teacher=true"), n_seeds=3),
    Variant("teacher_responses", "source", ("gkd.sft_share=1", "gkd.sft_target=teacher")),
    Variant("mixture", "source", ("gkd.sft_share=0.5", "gkd.sft_target=teacher")),
    Variant("sync", "schedule", ("trainer.scheduler=sync",)),
    Variant("two_step_off", "schedule", ("trainer.scheduler=two_step_off",)),
    Variant("staleness_4", "schedule", _N_STEP),
    Variant("staleness_4_inflight", "schedule", (*_N_STEP, "trainer.inflight_update=true")),
    Variant("k8", "top_k", (_K8,)),
    Variant("k256", "top_k", ("actor_rollout_ref.teacher.top_k=256",)),
    Variant("reverse_kl_student", "support", (*_REVERSE_KL, "actor_rollout_ref.teacher.support=student", _J64)),
    Variant("reverse_kl_union", "support", (*_REVERSE_KL, "actor_rollout_ref.teacher.support=union", *_HALVES)),
    Variant("union", "support", ("actor_rollout_ref.teacher.support=union", *_HALVES)),
    Variant("k8_renormalize", "tail", (_K8, "gkd.tail=renormalize")),
    Variant("k8_none", "tail", (_K8, "gkd.tail=none")),
    Variant("k1_expected", "sampled", ("gkd.distill_loss_type=k1",)),
    Variant("k1_none", "sampled", ("gkd.distill_loss_type=k1", "gkd.baseline=none")),
    Variant(
        "k1_group",
        "sampled",
        ("gkd.distill_loss_type=k1", "gkd.baseline=group", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=4"),
    ),
    Variant(
        "lora",
        "lora",
        (
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.actor.lora.rank=16",
            "actor_rollout_ref.actor.optim.lr=5.0e-4",
        ),
    ),
)


def ordered_runs(variants: Sequence[Variant] = VARIANTS) -> Iterator[tuple[Variant, int]]:
    """Yield variants and seeds: all variants with the first seed, then those with a second one, and so on."""
    for seed in range(1, max(variant.n_seeds for variant in variants) + 1):
        for variant in variants:
            if seed <= variant.n_seeds:
                yield variant, seed


def run_name(variant: Variant, seed: int) -> str:
    """Return the name of a run."""
    return f"{variant.name}-{seed}"
