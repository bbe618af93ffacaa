"""Requests to the teachers and the way of their results to the actor ranks.

``requests`` is the interface that :mod:`recipe_gkd.teachers` uses. ``pool`` implements it with Ray actors on the
nodes of the actor pool (``ray_worker``). ``homes`` selects the node of a sample, and ``fetch`` reads the stored results
in an actor rank.
"""
