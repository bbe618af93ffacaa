"""Deadlines of the configuration, with the names of their keys."""

from __future__ import annotations

from operator import attrgetter

from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema import Config
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout

ACTOR_TIMEOUT = key_name(lambda config: config.actor_rollout_ref.actor.timeout_s)
ROLLOUT_TIMEOUT = key_name(lambda config: config.actor_rollout_ref.rollout.timeout_s)
TEACHER_TIMEOUT = key_name(lambda config: config.actor_rollout_ref.teacher.timeout_s)
SYNC_TIMEOUT = key_name(lambda config: config.actor_rollout_ref.nccl_timeout)


def timeout_of(config: Config, key: str, margin_s: float = 0.0) -> KeyedTimeout:
    """Return the value of a key as a timeout that carries its name.

    Args:
        key: Full name of a key that is a time in seconds.
        margin_s: Time to add.
    """
    return KeyedTimeout(float(attrgetter(key)(config)), key, margin_s)
