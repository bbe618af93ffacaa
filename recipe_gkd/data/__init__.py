"""Data sets, prompts, samples and batches."""
