"""Advice about the bottleneck of a run: measured stages, a model of the step time, and changes."""
