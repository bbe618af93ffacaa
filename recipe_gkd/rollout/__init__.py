"""The student generating: a vLLM engine in one process, and the Ray worker around it.

``environment`` is what must be set before the process starts, ``vllm_compat`` the only module that imports vLLM,
``engine`` runs it in one thread, ``sampling`` says how tokens are drawn, ``weight_updates`` and ``vllm_weights`` take
new weights, ``vllm_calls`` is what vLLM's own worker processes are told to do, and ``ray_worker`` joins all of it.
Importing this package imports neither vLLM nor Ray.
"""
