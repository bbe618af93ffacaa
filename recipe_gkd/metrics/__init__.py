"""Timeline, step metrics, loggers, and advice about bottlenecks."""
