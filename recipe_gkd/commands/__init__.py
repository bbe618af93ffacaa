"""Commands besides training: ``python -m recipe_gkd <command>``."""
