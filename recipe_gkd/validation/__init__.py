"""Periodic evaluation of the student on held-out prompts during a training."""
