"""Assignment of prompts to rollout replicas."""

from __future__ import annotations

from collections.abc import Sequence

from recipe_gkd.data.samples import Prompt


def assign_prompts(prompts: Sequence[Prompt], n_replicas: int, responses_per_prompt: int) -> list[list[Prompt]]:
    """Assign prompts to rollout replicas in turn.

    All samples of one prompt go to the same replica, which then computes its prefix once. Prompts with a reference
    response need no generation. They are assigned last, so that the sampled ones are distributed evenly.

    Args:
        prompts: Prompts of a batch.
        responses_per_prompt: Number of consecutive uids that share a prompt.

    Returns:
        Prompts of each replica. The list of a replica may be empty.
    """
    groups: dict[int, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.reference_ids is not None):
        groups.setdefault(prompt.uid // responses_per_prompt, []).append(prompt)
    ordered = list(groups.values())
    return [[prompt for group in ordered[replica::n_replicas] for prompt in group] for replica in range(n_replicas)]
