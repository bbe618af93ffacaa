"""Commands and metrics in README and docs: every one exists, and its options, keys and files are valid.

Each command of the README matches a rule of ``RULES``. The rules run what a CPU can run in seconds: configurations are
composed and validated, scripts print their help. ``launch/quickstart.sh`` and ``launch/test.sh`` themselves are run by
continuous integration.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from recipe_gkd.__main__ import COMMANDS
from recipe_gkd.commands.arguments import config_parser
from recipe_gkd.config.load import read_config
from recipe_gkd.conversations.adapters.verifiers_environment import make_parser as make_adapter_parser
from teacher.__main__ import make_parser
from tests._support.base_config import REQUIRED
from tests._support.repository import REPO
from tests.unit.test_docs import PAGES, page_id

ASSIGNMENT = re.compile(r"[A-Z_0-9]+=")
METRIC = re.compile(
    r"`((?:timing|perf|training|response_seq_len|actor|weights|checkpoint|reward)/[a-z_]+[a-z0-9_]*)(?=[`{/,@ ])"
)
OTHER_NAMES = ("docs/migration.md", "CHANGELOG.md")
"""Pages with metrics of other projects, and of earlier versions."""


def commands_of(page: Path) -> list[list[str]]:
    """Return the commands of the bash blocks of a page as words, with the variables that precede each."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    parts = [part for line in lines for part in line.split(" && ")]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def split_variables(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the leading variables, and the remaining words."""
    n = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))
    return [word.partition("=")[0] for word in words[:n]], words[n:]


def nothing(_: list[str], __: list[str]) -> None:
    """Accept a command that belongs to the system, such as ``source``."""


def check_training(_: list[str], words: list[str]) -> None:
    arguments = [word for word in words if word != "..."]
    parsed = config_parser("main_gkd", "").parse_args(arguments)
    own = {word.partition("=")[0].lstrip("+") for word in parsed.overrides}
    required = [key for key in REQUIRED if key.partition("=")[0] not in own] if "..." in words else []
    with TemporaryDirectory() as folder:
        if parsed.config_dir:
            write_own_configuration(Path(folder), parsed.config_name)
        loaded = read_config(
            parsed.config_name, [*required, *parsed.overrides], Path(folder) if parsed.config_dir else None
        )
    assert not loaded.warnings


def write_own_configuration(folder: Path, name: str) -> None:
    """Write the YAML file of docs/config.md, which the commands with ``--config-path`` use."""
    [block] = re.findall(r"^```yaml\n(.*?)^```", (REPO / "docs/config.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (folder / f"{name}.yaml").write_text(block)


def check_command(_: list[str], words: list[str]) -> None:
    name, *arguments = words
    assert name in COMMANDS
    help_text = help_of("-m", "recipe_gkd", name)
    assert all(option.partition("=")[0] in help_text for option in arguments if option.startswith("--"))


def check_teacher(_: list[str], words: list[str]) -> None:
    make_parser().parse_args(words)


def check_script(variables: list[str], words: list[str]) -> None:
    script, *arguments = words
    assert os.access(REPO / script, os.X_OK) or script.startswith("launch/")
    options = [word for word in arguments if word.startswith("--")]
    shown = subprocess.run(["bash", script, "--help"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    known = re.findall(r"[A-Z_0-9]{3,}", (REPO / script).read_text() + shown)
    assert set(variables) <= {*known, "CUDA_VISIBLE_DEVICES"}
    assert all(option in shown for option in options)


def check_pip(_: list[str], words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    constraints = [words[i + 1] for i, word in enumerate(words) if word == "-c"]
    constraints += [words[i + 1] for i, word in enumerate(words) if word == "-r"]
    assert all((REPO / name).is_file() for name in constraints)
    extras = [name for word in words for name in re.findall(r"\[([\w,-]+)\]", word)]
    assert {name for group in extras for name in group.split(",")} <= set(setup["options.extras_require"])


def check_file(_: list[str], words: list[str]) -> None:
    assert (REPO / words[0]).is_file()


def check_fuzz(_: list[str], words: list[str]) -> None:
    assert (REPO / "tests/fuzz/__main__.py").is_file() and words[0] in ("pytest", "tests.fuzz")


def check_adapter(_: list[str], words: list[str]) -> None:
    make_adapter_parser().parse_intermixed_args(words)


RULES: dict[str, tuple[str, Callable[[list[str], list[str]], None]]] = {
    "training": (r"\S*python3? -m recipe_gkd\.main_gkd ", check_training),
    "command": (r"(?:\S*python3? -m recipe_gkd|recipe-gkd) (?=[a-z])", check_command),
    "teacher": (r"\S*python3? -m teacher ", check_teacher),
    "keys": (r"\S*python3? -m recipe_gkd\.config", nothing),
    "script": (r"(?:bash |sbatch )?(?=(?:launch|teacher)/\w+\.(?:sh|sbatch))", check_script),
    "pip": (r"(?:python -m |/venvs/\S+/)?pip install ", check_pip),
    "file": (r"\S*python3? (?=benchmarks/|docs/examples/|examples/)", check_file),
    "fuzz": (r"\S*python3? -m (?=pytest tests/fuzz |tests\.fuzz )", check_fuzz),
    "adapter": (r"\S*python3? '\$ADAPTER' ", check_adapter),
    "system": (
        r"(?:python3\.\d+ -m venv|source|export|ray|scp|cp|install|systemctl|kubectl|docker|pre-commit|mv|'\(sed'"
        r"|vllm serve|curl|python -m vllm\.\S+) ",
        nothing,
    ),
}
"""Kind of a command -> pattern of its beginning, and the check of its leading variables and of the words after it."""


def check(words: list[str]) -> str:
    """Check a command. Return the name of its rule, or an empty string if it matches none."""
    variables, words = split_variables(words)
    text = shlex.join(words).replace("'...'", "...")
    for name, (pattern, function) in RULES.items():
        if match := re.match(pattern, text + " "):
            function(variables, shlex.split(text[match.end() :]))
            return name
    return ""


@cache
def help_of(*arguments: str) -> str:
    command = [sys.executable, *arguments, "--help"]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("page", PAGES, ids=page_id)
class TestPage:
    def test_commands_of_bash_blocks_are_valid(self, page: Path) -> None:
        kinds = {shlex.join(words): check(words) for words in commands_of(page)}
        unknown = [command for command, kind in kinds.items() if not kind]
        assert not unknown, f"add a rule for: {unknown}"

    def test_named_commands_exist(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"`(?:python -m recipe_gkd|recipe-gkd) ([a-z][\w-]*)", text))
        assert named <= set(COMMANDS)

    def test_named_metrics_are_documented(self, page: Path) -> None:
        if page_id(page) in OTHER_NAMES:
            return
        documented = set(METRIC.findall((REPO / "docs/metrics.md").read_text(encoding="utf-8")))
        named = set(METRIC.findall(page.read_text(encoding="utf-8"))) - documented
        assert not {name for name in named if not (REPO / "recipe_gkd" / name).exists()}

    def test_named_scripts_exist(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        if page.name == "CHANGELOG.md":
            return  # it names files of earlier versions
        named = re.findall(r"(?<![\w/.-])((?:launch|teacher|benchmarks)/[\w./-]+\.(?:sh|py|sbatch|yaml))\b", text)
        assert not [name for name in named if not (REPO / name).is_file()]


def test_own_configuration_sets_what_it_says_and_keeps_the_defaults(tmp_path: Path) -> None:
    write_own_configuration(tmp_path, "my_run")
    loaded = read_config("my_run", [], tmp_path)
    text = (tmp_path / "my_run.yaml").read_text()
    config, default = loaded.config, read_config("on_policy_distill_trainer", REQUIRED).config
    assert not loaded.warnings
    assert f"experiment_name: {config.trainer.experiment_name}" in text
    assert f"distill_loss_type: {config.gkd.distill_loss_type}" in text
    assert config.gkd.distill_loss_type != default.gkd.distill_loss_type
    assert config.trainer.save_freq == default.trainer.save_freq


def test_wrong_commands_are_found() -> None:
    for command in ("frobnicate now", "./run.sh"):
        assert not check(shlex.split(command))
    for command in ("python -m recipe_gkd no-such-command", "python -m recipe_gkd.main_gkd ... trainer.schedular=sync",
                    "pip install -e .[gpus]", "NO_SUCH=1 teacher/start_server.sh"):  # fmt: skip
        with pytest.raises((AssertionError, ValueError)):
            check(shlex.split(command))


def test_readme_names_quickstart_and_training() -> None:
    kinds = [check(words) for words in commands_of(REPO / "README.md")]
    assert {"training", "command", "script", "pip"} <= set(kinds)
