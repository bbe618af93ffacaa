"""Memory that actor and rollout engines need on the devices that they share (``hybrid_engine``), before they start.

- ``actor_states`` computes the sizes of weights, gradients and optimizer state of an actor rank.
- ``phases`` computes what is on a device in each phase of a step, and refuses phases that do not fit.
- ``slots`` measures the memory of a slot on a node.
- ``check`` does all of this for the nodes of a run.
"""

from recipe_gkd.memory_budget.check import check_budget

__all__ = ["check_budget"]
