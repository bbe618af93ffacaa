"""Tool of ``tool_delays.py``: the calculator of the example, after a random wait."""

from __future__ import annotations

import asyncio
import os
import random

DELAY_VARIABLE = "TOOL_DELAY_S"
"""Environment variable with the longest wait of a call in seconds. The waits are uniform from 0."""


async def calculator(expression: str) -> int:
    """Add numbers.

    Args:
        expression: Sum of integers, such as 123+456.
    """
    await asyncio.sleep(random.uniform(0, float(os.environ[DELAY_VARIABLE])))
    return sum(map(int, expression.split("+")))
