"""Verify that this project works on this machine's GPUs, with tiny random models, in a few minutes.

python -m recipe_gkd gpu_smoke [--device cuda|cpu] [--only NAME ...] [--json FILE] [--list]

Each check runs in a separate process with a deadline, so that a crash or a hang does not hide the others. A check
that this machine does not allow (it needs two GPUs, vLLM is not installed) is reported as not possible, with the
reason, and is no failure.
"""

from recipe_gkd.commands.gpu_smoke.command import main

__all__ = ["main"]
