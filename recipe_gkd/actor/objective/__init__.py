"""The objective on a micro-batch: its terms, their weights and the metrics."""
