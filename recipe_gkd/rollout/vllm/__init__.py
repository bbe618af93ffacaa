"""Code of the rollout that depends on vLLM, most of it in the processes of the tensor-parallel ranks."""
