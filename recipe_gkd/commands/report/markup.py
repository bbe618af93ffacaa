"""Small pieces of HTML and SVG that several parts of the report use."""

from __future__ import annotations

import json
from html import escape

import numpy as np

from recipe_gkd.commands.report.series import Floats

VIEW = 1000
"""Width and height of a plot in SVG units. The browser stretches it to the size of its frame."""


def text(value: object) -> str:
    """Return ``value`` as text that is safe in HTML and in attributes."""
    return escape(str(value), quote=True)


def data_script(data: object) -> str:
    """Return an element with JSON for the page's script. Nothing in it can end the element."""
    content = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json">{content}</script>'


def rounded(values: Floats) -> list[float]:
    """Return values with five significant digits, for :func:`data_script`."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def table(head: list[str], rows: list[list[str]], name: str = "") -> str:
    """Return a table in a frame that scrolls on narrow screens.

    Args:
        head: Text of each column's head. Columns whose head starts with ``>`` are aligned to the right.
        rows: Cells as HTML.
        name: Class of the table.
    """
    right = [title.startswith(">") for title in head]
    cells = "".join(
        f"<th{_align(is_right)}>{text(title.removeprefix('>'))}</th>"
        for title, is_right in zip(head, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{_align(is_right)}>{cell}</td>" for cell, is_right in zip(row, right, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _align(is_right: bool) -> str:
    return ' class="num"' if is_right else ""


def line_path(x: Floats, y: Floats) -> str:
    """Return the path of a line through points in SVG units."""
    if len(x) == 1:  # a point is drawn as a line without length and with round ends
        return f"M{x[0]:.1f} {y[0]:.1f}h0"
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def band_path(x: Floats, low: Floats, high: Floats) -> str:
    """Return the path of the area between two lines in SVG units."""
    return line_path(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])) + "Z"


def dots_path(x: Floats, y: Floats) -> str:
    """Return a path of separate points, which round line ends make visible."""
    return "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x.tolist(), y.tolist(), strict=True))
