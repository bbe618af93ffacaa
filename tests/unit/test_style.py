"""Rules of CONTRIBUTING.md that ruff does not check: vocabulary, sizes, layout and allowed imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests._support.repository import REPO
from tests._support.waiting import FOREVER_S, PATIENCE_S

MAX_LINES, MAX_PARAMETERS, MAX_ROOT_MODULES = 60, 7, 11
FRAGMENT = re.compile(r"^(Of|What|Which|Whether|Those|That|How|As|Who|Where|Whom|Nobody|It is|They|Such|These|Else)\b")
VOCABULARY = re.compile(
    r"who may know|the house\b|\bunsay\b|\b[Gg]atekeeper|\blanes?\b|answers_now"
    r"|\bpicked\b|end_remains|EchoError|similar_lengths|\bunder way\b|\bhanded out\b|\bset aside\b|\bgiven answers?\b"
    r"|answers_\w+|answer_frame_bytes|\b(sampled|generated|truncated|reference|student's|rollout's) answers?\b"
    r"|\banswer_?(ids|len|length|tokens|logps|logprobs)\b|\bn_answers\b|\bmax_answer\w*"
    r"|\bgiven_ids\b|\bnobody\b|\bwhoever\b"
    r"|\black of memory\b|\bfrom which on\b|\b[Aa]lso if\b|\bof (its|their) own\b(?! \w)"
    r"|\b\w*(optimis|serialis|synchronis|normalis|tokenis|initialis|generalis|recognis|organis|summaris|minimis)(e|es|ed|er|ing|ation)\b"
    r"|\b(behaviour|colour|favour|honour|neighbour|artefact|learnt|signalled|modelled|travelled|labelled|whilst)\w*"
)
EXCEPTIONS = {
    "answers_fingerprint": (
        "CHANGELOG.md",
        "recipe_gkd/checkpoints/resume.py",
        "tests/unit/checkpoints/test_resume.py",
    ),
    "answers_and_process_states": ("tests/integration/ray_cluster/test_diagnostics.py",),
    "renormalise": ("recipe_gkd/config/", "tests/unit/config/", "docs/", "CHANGELOG.md"),
    "under way": ("CHANGELOG.md",),
    "lanes": ("recipe_gkd/losses/triton", "tests/unit/losses/test_triton"),
    "lane": ("recipe_gkd/losses/triton", "tests/unit/losses/test_triton"),
}
"""Words that are accepted in some files: former public names, the lanes of a GPU, and answers of processes."""

TEXT_FILES = (".py", ".md", ".sh", ".bash", ".yaml", ".toml", ".cfg")
BELOW = {
    "errors": set(),
    "runtime": {"errors"},
    "losses": {"errors", "runtime"},
    "config": {"errors", "losses", "runtime"},
    "data": {"errors", "config"},
    "pipeline": {"errors", "config", "data", "runtime", "metrics"},
    "weight_sync": {"errors", "runtime"},
}
"""Packages of ``recipe_gkd`` that a package may import, for those at the bottom."""
RECIPE_IMPORTS = {"client", "common", "errors", "records"}
"""Modules of ``teacher`` that ``recipe_gkd`` may import: the client with its records and errors, and the shared code.

Of ``wire`` it uses a few limits and checks only, which ``teacher`` itself exports.
"""
TEACHER_BASE = {"common", "errors", "logs", "records", "status", "wire"}
"""Modules that all parts of ``teacher`` may import. They import only each other."""
TEACHER_PARTS = {
    **{base: set[str]() for base in TEACHER_BASE},
    "client": set[str](),
    "engines": set[str](),
    "launcher": set[str](),
    "proxy": {"stop_signal"},
    "worker": {"engines", "stall_watchdog", "stop_signal", "worker_jobs"},
}
"""Further modules of ``teacher`` that each part may import."""
ARROW_WRITERS = {"recipe_gkd/commands/data/prepare.py", "recipe_gkd/addition/task.py"}
"""Modules that write parquet files."""
RECORDINGS = "recipe_gkd/teachers/recorded/"
"""Package of a format on disk that consists of parquet files."""
SLEEP = re.compile(r"""(?<!\w)sleep(?:\(|", "| )(\d+)\b(?![._])""")
RAY_FREE = ("errors", "runtime", "losses", "config", "data", "pipeline", "actor", "rollout", "weight_sync", "metrics")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if name.endswith(TEXT_FILES) and (REPO / name).is_file()]


FILES = tracked_files()
PYTHON_FILES = [name for name in FILES if name.endswith(".py")]


@cache
def parse(name: str) -> ast.Module:
    return ast.parse((REPO / name).read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.Module) -> Sequence[ast.AST]:
    return list(ast.walk(tree))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes, functions and attributes."""
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, part in zip([None, *node.body], node.body, strict=False):
                is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                if is_text and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                    yield part.lineno, str(part.value.value).strip()  # type: ignore[attr-defined]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def imports_of(name: str) -> Sequence[str]:
    """Return the dotted modules that a file imports."""
    found: list[str] = []
    for node in nodes(parse(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def package_of(name: str) -> str:
    """Return the package below ``recipe_gkd``, or the module directly in it."""
    return Path(name).parts[1].removesuffix(".py")


class TestLanguage:
    def test_docstrings_open_with_a_verb_or_a_noun_phrase(self) -> None:
        found = [
            f"{name}:{line}: {text.splitlines()[0]}"
            for name in PYTHON_FILES
            for line, text in docstrings(parse(name))
            if FRAGMENT.match(text)
        ]
        assert not found, "\n".join(found)

    def test_vocabulary_and_spelling_are_those_of_the_glossary(self) -> None:
        found = []
        for name in FILES:
            if name == "tests/unit/test_style.py":
                continue
            for number, line in enumerate((REPO / name).read_text(encoding="utf-8").splitlines(), 1):
                for match in VOCABULARY.finditer(line):
                    if not name.startswith(EXCEPTIONS.get(match[0].lower(), ("\0",))):
                        found.append(f"{name}:{number}: {match[0]!r} in: {line.strip()[:90]}")
        assert not found, "\n".join(found)


class TestTests:
    def test_no_sleeping_process_ends_by_itself_while_a_test_waits_for_its_end(
        self, pytestconfig: pytest.Config
    ) -> None:
        limit_s = float(pytestconfig.getini("timeout"))
        assert PATIENCE_S < limit_s < FOREVER_S
        found = [
            f"{name}: {sleep[0]}"
            for name in PYTHON_FILES
            if name.startswith("tests/")
            for sleep in SLEEP.finditer((REPO / name).read_text(encoding="utf-8"))
            if 20 <= int(sleep[1]) < limit_s
        ]
        assert not found, "sleep 3600 s, or less than 20 s:\n" + "\n".join(found)


class TestShape:
    def test_functions_are_short(self) -> None:
        found = [
            f"{name}:{function.lineno}: {function.name}"
            for name in PYTHON_FILES
            for function in functions(parse(name))
            if (function.end_lineno or 0) - function.lineno + 1 > MAX_LINES
        ]
        assert not found, f"more than {MAX_LINES} lines:\n" + "\n".join(found)

    def test_functions_of_the_packages_have_few_parameters(self) -> None:
        found = []
        for name in PYTHON_FILES:
            if name.startswith("tests/") or name.endswith("triton_kernels.py"):  # fixtures; a kernel's arguments
                continue
            for function in functions(parse(name)):
                given = function.args
                names = {each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]}
                if len(names - {"self", "cls", "ctx"}) > MAX_PARAMETERS:
                    found.append(f"{name}:{function.lineno}: {function.name}")
        assert not found, f"more than {MAX_PARAMETERS} parameters:\n" + "\n".join(found)

    def test_classes_of_the_pipeline_are_small(self) -> None:
        classes = [
            (f"{name}: {node.name}", (node.end_lineno or 0) - node.lineno + 1)
            for name in PYTHON_FILES
            if name.startswith("recipe_gkd/pipeline/")
            for node in ast.walk(parse(name))
            if isinstance(node, ast.ClassDef)
        ]
        assert classes and not [label for label, lines in classes if lines > 150]

    def test_public_classes_have_different_names(self) -> None:
        counts = Counter(
            node.name
            for name in PYTHON_FILES
            if name.startswith("recipe_gkd/")
            for node in nodes(parse(name))
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
        assert not [name for name, count in counts.items() if count > 1]

    def test_root_of_the_package_has_few_modules(self) -> None:
        assert len(list((REPO / "recipe_gkd").glob("*.py"))) <= MAX_ROOT_MODULES


class TestImports:
    def test_teacher_imports_nothing_of_recipe_gkd(self) -> None:
        found = [
            name
            for name in PYTHON_FILES
            if name.startswith("teacher/")
            if any(module.split(".")[0] == "recipe_gkd" for module in imports_of(name))
        ]
        assert not found

    def test_recipe_imports_client_records_errors_and_shared_code_of_teacher(self) -> None:
        import teacher

        found = [
            f"{name} imports {module}"
            for name in PYTHON_FILES
            if name.startswith("recipe_gkd/")
            for module in imports_of(name)
            if module.startswith("teacher.") and module.split(".")[1] not in RECIPE_IMPORTS | {*teacher.__all__}
        ]
        assert not found, "\n".join(found)

    @pytest.mark.parametrize("part", sorted(TEACHER_PARTS))
    def test_parts_of_teacher_import_only_what_is_below_them(self, part: str) -> None:
        names = [name for name in PYTHON_FILES if name.startswith(f"teacher/{part}")]
        assert names
        found = [
            f"{name} imports {module}"
            for name in names
            for module in imports_of(name)
            if module.startswith("teacher.") and module.split(".")[1] not in {part, *TEACHER_BASE, *TEACHER_PARTS[part]}
        ]
        assert not found, "\n".join(found)

    def test_shared_code_imports_no_engine(self) -> None:
        """The client, the driver and the scoring workers import it, and must not wait for torch."""
        names = [module_of(name) for name in PYTHON_FILES if name.startswith("teacher/common/")]
        large = "[name for name in ('torch', 'transformers', 'vllm') if name in sys.modules]"
        program = f"import sys, {', '.join(names)}; print({large})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize("package", BELOW)
    def test_package_imports_only_what_is_below_it(self, package: str) -> None:
        allowed = BELOW[package] | {package}
        found = [
            f"{name} imports {module}"
            for name in PYTHON_FILES
            if name.startswith("recipe_gkd/") and package_of(name) == package
            for module in imports_of(name)
            if module.startswith("recipe_gkd.") and module.split(".")[1] not in allowed
        ]
        assert not found, "\n".join(found)

    def test_ray_is_imported_only_where_workers_meet_it(self) -> None:
        found = [
            name
            for name in PYTHON_FILES
            if name.startswith("recipe_gkd/") and package_of(name) in RAY_FREE and not name.endswith("ray_worker.py")
            if any(module.split(".")[0] == "ray" for module in imports_of(name))
        ]
        assert not found

    def test_arrow_is_imported_only_where_files_are_read_and_written(self) -> None:
        """Other modules see rows, not Arrow's view of them."""
        found = {
            name
            for name in PYTHON_FILES
            if name.startswith("recipe_gkd/") and any(module.split(".")[0] == "pyarrow" for module in imports_of(name))
            if not name.startswith(RECORDINGS)
        }
        assert found == {"recipe_gkd/data/arrow_rows.py", *ARROW_WRITERS}

    def test_scoring_worker_starts_without_large_imports(self) -> None:
        large = "[name for name in ('torch', 'transformers') if name in sys.modules]"
        program = f"import sys, recipe_gkd.teachers.scoring.ray_worker; print({large})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize(("package", "other"), [("megatron", "fsdp"), ("fsdp", "megatron")])
    def test_training_backends_do_not_import_each_other(self, package: str, other: str) -> None:
        refused = (f"recipe_gkd.actor.{other}", *(["megatron"] if package == "fsdp" else []))
        names = [str(path.relative_to(REPO)) for path in (REPO / "recipe_gkd/actor" / package).glob("*.py")]
        assert names
        assert not [
            f"{name} imports {module}"
            for name in names
            for module in imports_of(name)
            if f"{module}.".startswith(tuple(f"{each}." for each in refused))
        ]

    def test_modules_have_no_import_cycle(self) -> None:
        """Imports inside functions count. Imports for types only do not, nor those of a package's own modules."""
        modules = {module_of(name): name for name in PYTHON_FILES if name.startswith(("recipe_gkd/", "teacher/"))}
        imported = {
            module: {
                target
                for target in modules_run_by(name, modules)
                if target != module and not module.startswith(f"{target}.")
            }
            for module, name in modules.items()
        }
        cycles = [module for module in modules if module in reachable(module, imported)]
        assert not cycles

    def test_packages_have_no_import_cycle(self) -> None:
        imported: dict[str, set[str]] = defaultdict(set)
        for name in PYTHON_FILES:
            if name.startswith("recipe_gkd/"):
                targets = {module.split(".")[1] for module in imports_of(name) if module.startswith("recipe_gkd.")}
                imported[package_of(name)] |= targets - {package_of(name)}
        reached = {package: reachable(package, imported) for package in list(imported)}
        assert not [package for package, others in reached.items() if package in others]


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def modules_run_by(name: str, modules: Collection[str]) -> set[str]:
    """Return those of the modules that a file imports other than for types."""
    tree = parse(name)
    checks = [node for node in nodes(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {part for check in checks for part in ast.walk(check)}
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            found |= {name if (name := f"{node.module}.{each.name}") in modules else node.module for each in node.names}
    return found & set(modules)


def reachable(start: str, imported: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imported.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found
