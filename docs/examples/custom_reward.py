"""A reward function: 1 if the last number of the response is the ground truth, minus a penalty for long responses.

    custom_reward_function.path=docs/examples/custom_reward.py data.ground_truth_key=answer
    gkd.use_rl_loss=true actor_rollout_ref.rollout.n=4

The function may take any of these parameters, in any order. It runs in its own processes, may import any package,
and is killed if a call exceeds ``custom_reward_function.timeout_s``.
"""

import re


def compute_score(prompt, response, ground_truth, extra):
    """Return the reward of one response.

    Args:
        prompt: Prompt as in the data: a text or a list of chat messages.
        response: Decoded response.
        ground_truth: Value of column ``data.ground_truth_key``.
        extra: All other columns of the row.
    """
    numbers = re.findall(r"-?\d+", response.replace(",", ""))
    is_correct = bool(numbers) and numbers[-1] == str(ground_truth)
    return float(is_correct) - 0.001 * max(0, len(response) - extra.get("max_chars", 400))
