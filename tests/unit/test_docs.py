"""README and docs agree with the code: keys, links, generated pages, examples."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.key_types import keys_of_type
from tests._support.repository import REPO

PAGES = sorted(REPO.glob("docs/*.md")) + [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
MAX_COLUMNS = 120
SECTIONS = "data|actor_rollout_ref|rollout|gkd|trainer|custom_reward_function|ray_init"
KEY = re.compile(rf"(?<![\w/.])((?:{SECTIONS})(?:\.(?!(?:py|md)\b)[a-z_]+)+)(?![\w(.*/{{-])")


def page_id(page: Path) -> str:
    return str(page.relative_to(REPO))


def known_keys() -> set[str]:
    """Return every key, groups included. The pages also write ``rollout.n`` for ``actor_rollout_ref.rollout.n``."""
    from omegaconf import DictConfig

    found: set[str] = set()

    def visit(node: DictConfig, prefix: str) -> None:
        for name in node:
            found.add(prefix + str(name))
            child = node._get_node(name)
            if isinstance(child, DictConfig) and not child._is_none():
                visit(child, f"{prefix}{name}.")

    visit(compose_config("on_policy_distill_trainer"), "")
    return found | {key.removeprefix("actor_rollout_ref.") for key in found}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
class TestPage:
    def test_keys_exist(self, page: Path) -> None:
        known, text = known_keys(), page.read_text(encoding="utf-8")
        theirs = "docs/migration.md" in str(page)  # its left columns are keys of other projects
        lines = [line.split("|", 2)[-1] if theirs and line.startswith("|") else line for line in text.splitlines()]
        keys = {key for line in lines for key in KEY.findall(line)}
        free = tuple(f"{section}." for section in keys_of_type(dict))
        assert not {key for key in keys if key not in known and not key.startswith(free)}

    def test_links_lead_to_files_and_headings(self, page: Path) -> None:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if target.startswith(("http://", "https://")):
                continue
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name} links to {target}"
            if heading and file.suffix == ".md":
                titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
                assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target

    def test_lines_are_short(self, page: Path) -> None:
        assert not list(long_lines(page.read_text(encoding="utf-8")))


def long_lines(text: str) -> Iterator[str]:
    """Yield lines above ``MAX_COLUMNS``. Tables, code blocks, and the targets of links and figures do not count."""
    in_code = False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith("|") and len(re.sub(r"\]\([^)]*\)", "]", line)) > MAX_COLUMNS:
            yield line


def test_long_lines_finds_text_only() -> None:
    long = "a" * (MAX_COLUMNS + 1)
    assert list(long_lines(f"{long}\n| {long} |\n```\n{long}\n```\n![figure]({long})\nb {long}")) == [long, f"b {long}"]


def test_misspelled_key_of_each_section_is_found() -> None:
    for section in SECTIONS.split("|"):
        (key,) = KEY.findall(f"set `{section}.no_such_key=1`")
        assert key not in known_keys()


def test_readme_is_short() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 150


def test_config_page_is_what_the_command_prints() -> None:
    printed = subprocess.run([sys.executable, "-m", "recipe_gkd.config"], capture_output=True, text=True, check=True)
    assert (REPO / "docs/config.md").read_text().endswith(printed.stdout)


def test_pages_contain_the_examples_that_are_tested() -> None:
    pages = "".join((REPO / "docs" / name).read_text() for name in ("customization.md", "data.md"))
    blocks = re.findall(r"```python\n(.*?)```", pages, flags=re.DOTALL)
    examples = sorted((REPO / "docs/examples").glob("*.py"))
    assert len(examples) == 6
    assert {example.read_text() for example in examples} <= set(blocks)
