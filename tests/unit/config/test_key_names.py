"""Config keys in strings of the code: a name that no schema has makes advice useless, or reads nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from recipe_gkd.config.key_types import keys_of_type, known_keys
from recipe_gkd.config.keys import key_name
from tests._support.repository import REPO

SECTIONS = "gkd|trainer|data|actor_rollout_ref|rollout|custom_reward_function|ray_init|actor|teacher|optim|fsdp_config"
KEY = re.compile(rf"(?<![\w./])(?:{SECTIONS})(?:\.[a-z_0-9]+)+")
FILES = (".py", ".parquet", ".json", ".jsonl", ".sh", ".yaml")
OTHER_PROJECTS = "foreign_keys"
WITHOUT_CONFIG = ("losses", "runtime")
"""Packages that may not import the configuration, and write the names of keys as text."""
UNKNOWN = "\0"
"""Text of a value in an f-string that is no constant."""
MODULES = sorted((REPO / "recipe_gkd").rglob("*.py"))


@cache
def section_names() -> frozenset[str]:
    """Return the full names of all keys and sections."""
    return frozenset(key.rsplit(".", n)[0] for key in known_keys() for n in range(key.count(".") + 1))


def abbreviated(names: Iterable[str]) -> set[str]:
    """Return the names, and their abbreviations that leave out the first parts."""
    return {name.split(".", n)[-1] for name in names for n in range(name.count(".") + 1)}


@cache
def constants(path: Path) -> Mapping[str, str]:
    """Return the texts of a module's constants, and of those that it imports."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("recipe_gkd."):
            source = REPO / f"{node.module.replace('.', '/')}.py"
            if source.is_file():
                texts = constants(source)
                found |= {alias.name: texts[alias.name] for alias in node.names if alias.name in texts}
        elif isinstance(node, ast.Assign):
            [target] = node.targets
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]
            found |= {name.id: text_of(value, found) for name, value in pairs if isinstance(name, ast.Name)}
    return found


def text_of(node: ast.expr, texts: Mapping[str, str]) -> str:
    """Return the text of an expression, with ``UNKNOWN`` for the parts that are no constants."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else UNKNOWN
    if isinstance(node, ast.Name):
        return texts.get(node.id, UNKNOWN)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text_of(getattr(part, "value", part) if isinstance(part, ast.FormattedValue) else part, texts)
            for part in node.values
        )
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "key_name" and isinstance(node.args[0], ast.Lambda):
        return ast.unparse(node.args[0].body).removeprefix("config.")
    return UNKNOWN


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module, without docstrings. Constants in f-strings have their values."""
    tree, texts = ast.parse(path.read_text()), constants(path)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped:
            yield text_of(node, texts)


def test_keys_in_strings_exist() -> None:
    known, free, found, unknown = abbreviated(section_names()), abbreviated(keys_of_type(dict)), 0, []
    for path in (path for path in MODULES if OTHER_PROJECTS not in path.parts):
        for name in (match[0] for text in strings(path) for match in KEY.finditer(text)):
            found += 1
            # A key with free entries, such as `data.apply_chat_template_kwargs`, may be followed by one of them.
            parents = {name.rsplit(".", n)[0] for n in range(name.count("."))}
            if not name.endswith(FILES) and name not in known and not parents & free:
                unknown.append(f"{path.relative_to(REPO)}: {name}")
    assert found > 600 and not unknown


def test_constants_with_names_of_keys_are_derived_from_the_schema() -> None:
    """Only packages that may not import the configuration write them as text."""
    names = {name for name in section_names() if "." in name}
    found = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in MODULES
        if path.parent.name not in WITHOUT_CONFIG
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for part in [node.value, *getattr(node.value, "elts", ())]
        if isinstance(part, ast.Constant) and part.value in names
    ]
    assert not found


def test_key_name_of_unknown_key_raises() -> None:
    assert key_name(lambda config: config.actor_rollout_ref.actor.megatron) == "actor_rollout_ref.actor.megatron"
    with pytest.raises(AttributeError, match=r"actor_rollout_ref\.actor\.dtype"):
        key_name(lambda config: config.actor_rollout_ref.actor.dtype)  # a property of the schema, not a key
