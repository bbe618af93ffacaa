"""Show a data set as a training run would read it. Neither Ray nor a teacher is needed.

python -m recipe_gkd data inspect FILE [actor_rollout_ref.model.path=FOLDER] [data.prompt_key=question ...]

Prints columns, and with a model: lengths in tokens, rows that would be dropped, and a prompt after the chat template.
"""

from recipe_gkd.commands.data.inspect import main

__all__ = ["main"]
