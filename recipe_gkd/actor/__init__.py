"""The student in training, on Megatron-core or PyTorch FSDP.

:class:`~recipe_gkd.actor.student_actor.StudentActor` is one rank of it and runs in any process.
:class:`~recipe_gkd.actor.ray_worker.ActorWorker` is the same as a Ray actor.
:func:`~recipe_gkd.actor.shards.shard_batch` divides a batch among the data-parallel ranks.
"""
