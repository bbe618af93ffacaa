"""Number of examples of the property tests: a short, fixed list by default, and ``--hypothesis-profile=long``."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

LONG = "long"
_LONG_FACTOR = 100

settings.register_profile(LONG)


def examples(n: int, *, shrink: bool = True) -> settings:
    """Return the settings of a test.

    Args:
        n: Number of examples, the same on every machine. The long profile runs 100 times as many random ones.
        shrink: False for a receiver that a failure ends, where every further example costs a new one.
    """
    is_long = settings.get_current_profile_name() == LONG
    return settings(
        max_examples=_LONG_FACTOR * n if is_long else n,
        derandomize=not is_long,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])],
    )
