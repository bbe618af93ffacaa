"""One line of explanation for each figure of the quickstart's table."""

from __future__ import annotations

FIGURES = {
    "teacher": "share of problems that it answers exactly, with greedy sampling",
    "student before": "the student before the distillation",
    "student after": "the same student after it; it should be close to the teacher",
    "training steps": "optimizer steps",
    "tokens": "prompt and response tokens that were trained on",
    "loss": "mean per response token, in nats; it falls as the student learns",
    "staleness": "age of the weights that sampled a response, in steps; bounded by trainer.scheduler",
    "memory": "largest process of each kind",
    "stages": "wall-clock; a stage that an earlier start completed is not repeated",
}
"""Row of the table -> its explanation."""

TIMINGS = {
    "step": "whole step; generation, teacher and update of different batches overlap in it",
    "generate_sequences": "from the first prompt to the last response of a batch",
    "generate_sequences_max": "the slowest rollout worker",
    "generate_sequences_mean": "mean of the rollout workers",
    "generate_sequences_min": "the fastest rollout worker",
    "update_actor": "forward, backward and optimizer step",
    "get_teacher_knowledge": "from the first request to the last result of the teacher",
    "teacher_tail": "the part of it after the last response",
    "environment_mean": "a conversation in calls of its environment or tools, mean",
    "environment_max": "the slowest conversation in them",
    "wait_prev_gen": "the trainer waited for responses",
    "wait_prev_teacher": "the trainer waited for the teacher",
    "wait_prev_prev_teacher": "the trainer waited for the teacher",
    "wait_sync": "the trainer waited for a weight sync",
    "wait_reward": "the trainer waited for the reward function",
    "sync_rollout_weights": "transfer of new weights to the rollout workers",
    "sync_rollout_weights_begin": "its start: responses in flight are finished",
    "sync_rollout_weights_transfer": "its transfer",
    "sync_rollout_weights_commit": "its end: engines use the new weights",
    "sync_probe": "rollout engines and actor compute the same tokens after it",
    "validate": "validation on held-out prompts",
    "save_checkpoint": "checkpoints; the mean is over the steps that save one",
    "log": "writing the metrics",
    "other": "the rest of the trainer's time",
    "engine_sleep": "rollout engines release their memory",
    "engine_wake": "rollout engines allocate it again",
    "teacher_sleep": "the teacher releases its memory",
    "teacher_wake": "the teacher allocates it again",
}
"""Name of a metric without ``timing/`` -> its explanation."""
