"""Utilities for processes, threads, tasks and files. Nothing here imports Ray or torch."""
