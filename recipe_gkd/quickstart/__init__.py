"""A task small enough for a laptop, on which on-policy distillation visibly works: 3-digit addition, shown step by step."""
