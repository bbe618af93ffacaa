"""Code that the teacher service and the trainer share. It imports neither torch nor vLLM when it is imported."""
