"""Loggers: where the metrics of each step go."""
