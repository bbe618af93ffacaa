"""A task for two CPU cores on which on-policy distillation visibly works: 3-digit addition, carry by carry."""
