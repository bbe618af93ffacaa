"""What a run reports: spans of time, throughput and memory, and the loggers that write them."""
