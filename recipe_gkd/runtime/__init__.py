"""Utilities for processes, threads, tasks and files of any process. Nothing here imports Ray or torch."""
