"""Coverage-guided fuzzing of the decoders with atheris: ``python -m tests.fuzz [libFuzzer options] [CORPUS]``.

The inputs are hypothesis's choices, so that mutations are made in the strategies. It runs until Ctrl-C or a failure.
"""

from __future__ import annotations

import sys

from hypothesis import given

if __name__ == "__main__":
    try:
        import atheris
    except ImportError:
        sys.exit(
            "atheris is not installed; run `pip install atheris`, or `pytest tests/fuzz --hypothesis-profile=long`"
        )
    with atheris.instrument_imports(include=["teacher"]):  # a module that is imported before has no coverage
        from tests.fuzz.hostile import Frames, hostile
        from tests.fuzz.profile import examples
        from tests.fuzz.test_decoders import decode, use

    @examples(1)
    @given(hostile())
    def check(frames: Frames) -> None:
        """Decode a message, and use it if it is accepted."""
        if (message := decode(frames)) is not None:
            use(message, frames)

    atheris.Setup(sys.argv, check.hypothesis.fuzz_one_input)
    atheris.Fuzz()
