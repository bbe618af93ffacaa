"""The student as a generator: a vLLM engine in one process, and the Ray worker around it.

- ``environment`` has the environment variables of the process, and ``limits`` the checks before it starts.
- ``ray_worker`` has the methods of a worker, and ``update_gate`` stops its generation during a weight update.
- ``engine`` runs vLLM in one thread. ``engine_options``, ``engine_factory`` and ``engine_requests`` build the engine
  and its requests, and ``sampling`` has the sampling parameters.
- ``weight_updates`` has the state of an engine's weights, and ``engine_sleep`` the state of its memory.
- ``vllm`` depends on vLLM. Most of it runs in the process of each tensor-parallel rank; ``vllm.compat`` imports it.

Importing this package imports neither vLLM nor Ray.
"""
