"""Check of the student's model folder and tokenizer."""

from __future__ import annotations

from recipe_gkd.commands.doctor.findings import Finding, findings_of, problems_of
from recipe_gkd.config import Config
from recipe_gkd.config.data_types import conversion_warnings
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import read_student

_TEXT = "1 + 2 = 3"


def student_findings(config: Config) -> tuple[Student | None, list[Finding]]:
    """Read the model folder, and tokenize a text.

    Returns:
        The student, None if it cannot be used, and the findings.
    """
    students: list[Student] = []

    def check() -> list[Finding]:
        students.append(read_student(config))
        return [_student_finding(students[0])]

    found = list(findings_of("student", check))
    student = students[0] if students else None
    if student is not None:
        found += findings_of("tokenizer", lambda: [_tokenizer_finding(student)])
        warnings = conversion_warnings(config)
        same = f"the actor and the rollout engines use {config.actor_rollout_ref.actor.dtype}"
        found += problems_of("data types", warnings, otherwise=same, severity="warning")
    return student, found


def _student_finding(student: Student) -> Finding:
    return Finding("student", "ok", f"{student.path}: output layer of {student.vocab_size} ids, weight files complete")


def _tokenizer_finding(student: Student) -> Finding:
    tokenizer = student.tokenizer
    ids = tokenizer(_TEXT)["input_ids"]
    if tokenizer.unk_token_id is not None and len(ids) > 0 and set(ids) <= {tokenizer.unk_token_id}:
        return Finding(
            "tokenizer", "problem",
            f"the tokenizer of {student.path} makes only unknown tokens of {_TEXT!r}; copy the original tokenizer "
            "files of the model into the folder",
        )  # fmt: skip
    if not ids or max(ids) >= student.vocab_size:
        return Finding(
            "tokenizer", "problem",
            f"the tokenizer of {student.path} makes the ids {ids} of {_TEXT!r}, but the output layer has "
            f"{student.vocab_size} rows; copy the original tokenizer files of the model into the folder",
        )  # fmt: skip
    end = f"a text ends with {tokenizer.eos_token!r}" if tokenizer.eos_token is not None else "it has no EOS token"
    return Finding("tokenizer", "ok", f"{student.n_tokens} ids; {end}")
