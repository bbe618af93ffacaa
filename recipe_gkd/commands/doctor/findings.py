"""Findings of the checks, and their text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from recipe_gkd.diagnostics.unexpected_errors import as_known_error

Severity = Literal["ok", "warning", "problem", "skipped"]

_WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        severity: ``problem`` if the run cannot work, ``skipped`` if the check was not possible.
        text: What was found. For a warning and a problem also what is expected, and the remedy.
    """

    check: str
    severity: Severity
    text: str


Check = Callable[[], Iterable[Finding]]


def findings_of(name: str, check: Check) -> Iterator[Finding]:
    """Yield the findings of a check. An error that it raises is a problem."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - a check that fails must not end the others
        yield Finding(name, "problem", str(as_known_error(error, name)))


def problems_of(name: str, messages: Iterable[str], *, otherwise: str, severity: Severity = "problem") -> list[Finding]:
    """Return a finding for each message, or one that everything is in order.

    Args:
        messages: Problems with their remedies.
        otherwise: Text of the finding if there is no message.
        severity: Severity of the messages.
    """
    return [Finding(name, severity, text) for text in messages] or [Finding(name, "ok", otherwise)]


def line_of(finding: Finding) -> str:
    """Return the finding as one line, or as an indented paragraph if it is long."""
    head = f"{finding.severity:<9}{finding.check:<17} "
    body = [line for part in finding.text.splitlines() for line in _wrapped(part, _WIDTH - len(head))]
    return head + f"\n{' ' * len(head)}".join(body)


def summary_of(findings: Iterable[Finding]) -> str:
    """Return the numbers of problems and warnings as a sentence."""
    severities = [finding.severity for finding in findings]
    counts = ((severities.count(kind), kind) for kind in ("problem", "warning"))
    listed = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in counts)
    return f"{len(severities)} findings: {listed}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ") or [""]
