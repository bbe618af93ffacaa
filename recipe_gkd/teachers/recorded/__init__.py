"""Recorded scores of reference responses: a teacher without a model (``actor_rollout_ref.teacher.backend=recorded``).

`layout` is the format of a recording on disk, `writer` writes one, `teacher` is the backend that reads it.
``python -m recipe_gkd record`` makes a recording.
"""
