"""Jinja templates of the report, in ``assets/``. Every value is escaped unless it is the result of a template.

Control characters of a text are shown as escapes, see :mod:`teacher.common.display_text`.
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from recipe_gkd.commands.report.series import duration, number
from teacher.common.display_text import make_visible


def render(template: str, /, **values: object) -> Markup:
    """Return the HTML of a template with these values."""
    return Markup(environment().get_template(template).render(values))


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    loader = PackageLoader("recipe_gkd.commands.report", "assets")
    found = Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    found.finalize = _show_controls
    found.filters |= {"number": number, "duration": duration}
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}
    return found


def _show_controls(value: object) -> object:
    """Return a text without control characters, and other values as they are."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return make_visible(str(value), keep="\n\t") if is_text else value
