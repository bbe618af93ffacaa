"""Transfer of the actor's weights to every rollout worker, as one version.

- ``synchronizer`` is the driver. ``spec`` has its settings, ``connection`` sets up the transport, and ``cleanup`` drops
  a failed update on all workers.
- ``sender`` and ``receiver`` are the two sides of one update. ``sender_api`` has the methods of an actor worker.
- ``bucket_plan`` is the layout of tensors in buckets, and ``host_memory`` the memory of the buckets.
- ``transport`` is the interface that moves buckets. ``collective`` uses gloo or NCCL, ``ipc`` uses shared memory.
- ``private_group`` is the group of ``collective``. ``opening`` connects it on all ranks, with a deadline.
- ``store``, ``mailbox`` and ``peers`` carry messages between the ranks of a transport.

Every wait has a deadline, with one exception: rollout workers wait without one while the process of rank 0 is stopped
(see ``Transport``). The driver's deadline then ends the sync, and its shutdown ends those waits. Nothing here imports
vLLM, Megatron or Ray.
"""
