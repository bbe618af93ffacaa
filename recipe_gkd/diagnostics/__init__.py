"""Stacks, logs and state that are saved when a deadline passes or a worker dies."""
