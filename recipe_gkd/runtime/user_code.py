"""Functions and classes of user files that a config key names."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recipe_gkd.errors import ConfigError


def split_spec(spec: str, *, key: str, example: str = "mine.py:MyClass") -> tuple[str, str]:
    """Split ``path:Name`` into the path of a Python file and a name in it.

    Args:
        spec: Value of the config key, such as ``/home/me/loggers.py:Slack``.
        key: Name of the config key, for the error.
        example: Valid value of the key, for the error.

    Raises:
        ConfigError: ``spec`` is not of this form.
    """
    path, separator, name = spec.rpartition(":")
    if not (separator and path and name.isidentifier()):
        raise ConfigError(f"{key}: got {spec!r}, expected FILE.py:Name, such as {example}", keys=(key,))
    return path, name


def load_attribute(path: str, name: str, *, key: str) -> Any:
    """Return the function or class ``name`` of the Python file ``path``.

    The file is executed once in each process. It can import modules of its folder.

    Args:
        path: Python file.
        name: Name that the file defines.
        key: Name of the config key, for errors.

    Raises:
        ConfigError: The file does not exist, cannot be imported, or does not define ``name``.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(
            f"{key}: there is no file {file}",
            remedy=f"give the path of a Python file that defines {name}",
            keys=(key,),
        )
    module_name = f"recipe_gkd_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}: {file} is not a Python file", remedy="rename it to end in .py", keys=(key,))
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            with _siblings_first(str(file.parent)):
                spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
            del sys.modules[module_name]
            what = f"{key}: {file} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigError(what, keys=(key,)) from error
    if not hasattr(module, name):
        public = sorted(each for each in vars(module) if not each.startswith("_"))
        what = f"{key}: {file} does not define {name}, but {', '.join(public) or 'nothing'}"
        raise ConfigError(what, keys=(key,))
    return getattr(module, name)


@contextmanager
def _siblings_first(folder: str) -> Iterator[None]:
    """Make ``folder`` the first entry of ``sys.path`` in the body, and the last one afterwards.

    Installed modules with common names, such as ``utils``, then do not hide those beside the user's file. Afterwards
    functions of the file can still import modules of its folder, which no longer hide installed ones from this process.
    """
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may have changed sys.path
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def call_problem(function: Callable[..., Any], *arguments: object, **keywords: object) -> str | None:
    """Return the reason why ``function`` cannot be called with these arguments, None if it can be.

    Args:
        function: Function or class. A class is called with the parameters of its constructor.
        *arguments: Positional arguments with any value.
        **keywords: Keyword arguments with any value.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some classes that are implemented in C have no signature
        return None
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        return f"{error}; its signature is {signature}"
    return None
