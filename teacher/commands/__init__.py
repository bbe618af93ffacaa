"""The commands of `python -m teacher`: each module adds its own to the parser."""
