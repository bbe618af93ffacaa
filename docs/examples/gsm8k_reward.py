"""A reward function for GSM8K and other data with a number as ground truth: 1 for the right number, else 0.

    custom_reward_function.path=docs/examples/gsm8k_reward.py

The answer is the number after the last ``####``, or else the last number of the response.
"""

import re
from decimal import Decimal

NUMBER = re.compile(r"-?[$€]?\d[\d,]*(?:\.\d+)?")


def compute_score(response, ground_truth):
    """Return 1.0 if the response ends with the right number, and whether it has the format.

    Args:
        response: Decoded response.
        ground_truth: The right number as text, such as ``"1200"``.
    """
    _, marker, after = response.rpartition("####")
    numbers = NUMBER.findall(after)
    answer = (numbers[0] if marker else numbers[-1]) if numbers else None
    is_correct = answer is not None and _value(answer) == _value(str(ground_truth).strip())
    return {"score": float(is_correct), "has_format": bool(marker)}


def _value(text):
    digits = re.sub(r"[$€,]", "", text)
    return Decimal(digits) if NUMBER.fullmatch(digits) else text
