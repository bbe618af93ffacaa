"""Commands other than training: ``python -m recipe_gkd <command>``."""
