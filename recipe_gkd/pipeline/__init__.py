"""The schedule that overlaps generation, teacher requests and training within a staleness bound."""
