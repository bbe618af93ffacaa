"""The student in training, on Megatron-core or PyTorch FSDP2.

:class:`~recipe_gkd.actor.student_actor.StudentActor` is one rank of it and runs in any process.
:class:`~recipe_gkd.actor.ray_worker.ActorWorker` is the same as a Ray actor.
:mod:`~recipe_gkd.data.sharding` divides a batch among the data-parallel ranks, in the driver.
"""
