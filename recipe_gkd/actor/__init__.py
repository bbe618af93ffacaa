"""The student in training, on Megatron-core.

``megatron_actor.MegatronActor`` is one rank of it in any process, ``ray_worker.ActorWorker`` the same behind Ray, and
``microbatch.shard_batch`` divides a batch among the data-parallel ranks.
"""
