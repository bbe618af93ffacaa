"""Commands of `python -m teacher`. Each module adds its commands to the parser."""
