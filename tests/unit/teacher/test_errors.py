"""Text of the errors of the teacher service: each place once, from the outermost to the innermost."""

from __future__ import annotations

import pytest

from teacher.errors import TeacherAsleep, TeacherError, TeacherRequestError, TeacherTimeout, TeacherUnreachable

ADDRESS = "tcp://10.0.0.1:15555"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TeacherError("x", address=ADDRESS, options=("--bind",)), "x"),
        (TeacherAsleep("x", operation="hello", address=ADDRESS), f"hello at {ADDRESS}: x"),
        (TeacherUnreachable(f"none at {ADDRESS}", operation="hello", address=ADDRESS), f"hello: none at {ADDRESS}"),
        (TeacherError("x", step=3, teacher="math"), "step 3: teacher math: x"),
        (
            TeacherTimeout("x", step=0, teacher="math", samples=(4, 5), operation="status", worker="worker a:1"),
            "step 0: teacher math, 2 samples (4, 5): status: worker a:1: x",
        ),
        (TeacherRequestError("x", sequence=0, remedy="y"), "sequence 0: x; y"),
        (TeacherRequestError("x", sequence=0, uid=7), "sample 7: x"),
    ],
)
def test_text_has_the_places_in_order(error: TeacherError, text: str) -> None:
    assert str(error) == text
