"""Environments of other packages as environments of conversations. Each file is loaded by its path."""
