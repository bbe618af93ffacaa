"""Tool of the example: ``rollout.tools=[examples/calculator/tools.py:calculator]``."""

from __future__ import annotations

import re


def calculator(expression: str) -> int:
    """Add numbers.

    Args:
        expression: Sum of integers, such as 123+456.
    """
    if not re.fullmatch(r"[0-9]+(\+[0-9]+)*", expression, re.ASCII):
        raise ValueError("expected a sum such as 123+456")
    return sum(map(int, expression.split("+")))
