"""Write the table of ``docs/models.md``: ``python -m tests.integration.families.table``."""

from __future__ import annotations

from tests._support.families import FAMILIES, Family
from tests._support.repository import REPO

PAGE = REPO / "docs" / "models.md"
BEGIN, END = "<!-- table of families: begin -->", "<!-- table of families: end -->"
COLUMNS = {
    "Megatron": "megatron",
    "its LoRA": "megatron_lora",
    "FSDP": "fsdp",
    "LoRA of FSDP": "lora",
    "vLLM rollout": "rollout",
    "teacher service": "teacher",
}


def table() -> str:
    """Return the table, with a footnote for each reason."""
    notes: list[str] = []
    lines = [
        "| family | `model_type` | released models | " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * (3 + len(COLUMNS)),
    ]
    for family in FAMILIES:
        cells = [_cell(_reason(family, attribute), notes) for attribute in COLUMNS.values()]
        name = family.name + (f" {_mark(family.note, notes)}" if family.note else "")
        lines.append(f"| {name} | `{family.model_type}` | {family.examples} | {' | '.join(cells)} |")
    footnotes = [f"{number}. {_sentence(note)}." for number, note in enumerate(notes, start=1)]
    return "\n".join([*lines, "", *footnotes])


def page(text: str) -> str:
    """Return the page with the table of this version."""
    return with_block(text, BEGIN, table(), END)


def with_block(text: str, begin: str, block: str, end: str) -> str:
    """Return the page with a block between two marks."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"


def _reason(family: Family, attribute: str) -> str:
    return str(getattr(family, attribute))


def _cell(reason: str, notes: list[str]) -> str:
    return f"no {_mark(reason, notes)}" if reason else "yes"


def _sentence(note: str) -> str:
    """Return a note with a capital letter, except for names that have none."""
    return note if note.startswith(("vLLM", "peft")) else note[0].upper() + note[1:]


def _mark(note: str, notes: list[str]) -> str:
    """Return the number of a footnote, which is added if it is new."""
    if note not in notes:
        notes.append(note)
    return f"({notes.index(note) + 1})"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
