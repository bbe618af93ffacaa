"""The student in training, on Megatron-core. Import :class:`recipe_gkd.actor.megatron_actor.MegatronActor` for one rank of
it, :mod:`recipe_gkd.actor.ray_worker` for the same behind Ray, :mod:`recipe_gkd.actor.microbatch` for dividing a batch.
"""
