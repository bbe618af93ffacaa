"""Asynchronous on-policy knowledge distillation: Megatron-core actor, vLLM rollout, ZeroMQ teacher, Ray pools."""

from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

__version__ = "0.1.0"


def _check_teacher() -> None:
    """Check that ``teacher`` is the package of this project, which is installed beside this one.

    Raises:
        ImportError: A file or folder that precedes it in ``sys.path``, such as one of the current folder, hides it.
    """
    spec, expected = _find_spec("teacher"), _Path(__file__).parents[1] / "teacher"
    if spec is None or spec.origin is None or _Path(spec.origin).resolve() != (expected / "__init__.py").resolve():
        locations = (
            [] if spec is None else [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        )
        # With this name, `python -m` prints the sentence without a traceback.
        raise ImportError(
            f"the package teacher is {', '.join(map(str, locations)) or 'missing'}, expected {expected}; rename that "
            "file or folder, or run the command in another folder. If it is a plain folder, an older installation is "
            "the cause: run `pip install --no-deps -e .` or launch/setup.sh again",
            name=__name__,
        )


_check_teacher()
