"""Metrics of the conversations of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recipe_gkd.data.parts import by_response
from recipe_gkd.data.samples import Response, Sample
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.errors import ConversationError
from recipe_gkd.rewards.reporting import mean_numbers


def conversation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of the conversations of a batch; empty without any.

    Raises:
        ConversationError: All of them have failed.
    """
    of_responses = [parts for parts in by_response(samples) if parts[0].response.transcript is not None]
    if not of_responses:
        return {}
    transcripts = [found for parts in of_responses if (found := parts[0].response.transcript) is not None]
    failed = [found for found in transcripts if found.failure]
    if len(failed) == len(transcripts):
        raise ConversationError(
            f"all {len(failed)} conversations of the batch have failed, the last one: {failed[-1].failure}",
            remedy="correct the environment",
            failures=len(failed),
        )
    responses = [sample.response for parts in of_responses for sample in parts]
    n_sampled, n_inserted = sum(len(part.ids) for part in responses), sum(part.n_inserted for part in responses)
    rewards = [found.reward for found in transcripts if found.reward is not None]
    metrics = {
        "conversation/turns_mean": _mean(transcripts, "n_turns"),
        "conversation/turns_max": float(max(found.n_turns for found in transcripts)),
        "conversation/tool_calls_mean": _mean(transcripts, "n_tool_calls"),
        "conversation/tool_errors": float(sum(found.n_tool_errors for found in transcripts)),
        "conversation/failures": float(len(failed)),
        "conversation/restarts": float(sum(found.n_restarts for found in transcripts)),
        "conversation/unfinished_fraction": float(np.mean([found.end != "stop" for found in transcripts])),
        "conversation/sequences_mean": len(responses) / len(transcripts),
        "conversation/sampled_share": n_sampled / max(n_sampled + n_inserted, 1),
        "timing/environment_mean": _mean(transcripts, "environment_s"),
        "timing/environment_max": max(found.environment_s for found in transcripts),
    }
    if rewards:
        metrics["conversation/reward_mean"] = float(np.mean(rewards))
    return metrics | mean_numbers([found.numbers for found in transcripts], "environment/")


def validation_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Return the metrics of the conversations of a validation, over all data sources; empty without any."""
    transcripts = [found for response in responses if (found := response.transcript) is not None]
    if not transcripts:
        return {}
    return {
        "val/conversation/turns_mean": _mean(transcripts, "n_turns"),
        "val/conversation/tool_errors": float(sum(found.n_tool_errors for found in transcripts)),
        "val/conversation/failures": float(sum(bool(found.failure) for found in transcripts)),
    }


def _mean(transcripts: Sequence[Transcript], name: str) -> float:
    return float(np.mean([getattr(found, name) for found in transcripts]))
