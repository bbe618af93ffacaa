"""Jinja templates of the report, in ``assets/``. Every value is escaped unless it is the result of a template."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from recipe_gkd.commands.report.series import duration, number


def render(template: str, /, **values: object) -> Markup:
    """Return the HTML of a template with these values."""
    return Markup(environment().get_template(template).render(values))


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    loader = PackageLoader("recipe_gkd.commands.report", "assets")
    found = Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    found.filters |= {"number": number, "duration": duration}
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}
    return found
