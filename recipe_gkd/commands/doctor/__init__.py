"""Check that a run with this configuration can work here, and print a remedy for each problem. Nothing is trained.

python -m recipe_gkd doctor --config-name on_policy_distill_trainer key=value ... [--quick] [--json]

First come checks that start nothing: the configuration, versions, devices, ports, the run folder and its disk,
/dev/shm, the memory, the data, the student with its tokenizer and chat template, and the teachers with their limits.
If none of them found a problem, the workers of the run start. They receive the student's weights, generate a few
responses, and the actor computes the loss of these with the student itself as teacher, which must be 0. With --quick
nothing is started.

Exit status: 0 without a problem, 1 with one, 130 after Ctrl-C.
"""

from recipe_gkd.commands.doctor.command import main

__all__ = ["main"]
