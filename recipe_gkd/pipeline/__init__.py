"""The schedule: generation, teacher scoring and training overlap within a staleness bound."""
