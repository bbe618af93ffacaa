"""Config keys in strings of the code: a name that no schema has makes advice useless, or reads nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from recipe_gkd.config.key_types import known_keys
from tests._support.repository import REPO

SECTIONS = "gkd|trainer|data|actor_rollout_ref|rollout|custom_reward_function|ray_init|actor|teacher|optim|fsdp_config"
KEY = re.compile(rf"(?<![\w./])(?:{SECTIONS})(?:\.[a-z_0-9]+)+")
FILES = (".py", ".parquet", ".json", ".jsonl", ".sh", ".yaml")
OTHER_PROJECTS = "foreign_keys"


def known_names() -> set[str]:
    """Return all keys and sections, and their abbreviations that leave out the first parts."""
    names = {key.rsplit(".", n)[0] for key in known_keys() for n in range(key.count(".") + 1)}
    return {name.split(".", n)[-1] for name in names for n in range(name.count(".") + 1)}


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module, without docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_keys_in_strings_exist() -> None:
    known, found, unknown = known_names(), 0, []
    for path in sorted((REPO / "recipe_gkd").rglob("*.py")):
        if OTHER_PROJECTS in path.parts:
            continue
        for name in (match[0] for text in strings(path) for match in KEY.finditer(text)):
            found += 1
            # A key with free entries, such as `data.apply_chat_template_kwargs`, may be followed by one of them.
            parents = (name.rsplit(".", n)[0] for n in range(name.count(".")))
            if not name.endswith(FILES) and not any(parent in known and "." in parent for parent in parents):
                unknown.append(f"{path.relative_to(REPO)}: {name}")
    assert found > 300 and not unknown
