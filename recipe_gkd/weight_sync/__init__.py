"""Fresh weights from the actor's rank 0 to every rollout worker: buckets, one version number, a deadline on every wait.

One wait has none of its own, on rollout workers while the process of rank 0 is stopped (see ``Transport``); there the
driver's deadline ends the sync, and its shutdown the wait.

``buckets`` says how tensors lie in buffers; ``transport`` is what moves buffers between processes, ``channel`` by
collectives and ``ipc`` through shared memory; ``sender`` and ``receiver`` are the two ends of one update,
``actor_side`` is what an actor worker delegates to, and ``sync`` is the driver that lets all of them act together.
Nothing here imports vLLM, Megatron or Ray.
"""
