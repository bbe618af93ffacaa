"""Lengths of the paths of one training step, measured on a real run: files and calls that data passes through."""
