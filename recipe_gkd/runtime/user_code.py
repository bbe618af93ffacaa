"""Functions and classes of user files that a config key names."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from recipe_gkd.errors import ConfigError


def split_spec(spec: str, *, key: str) -> tuple[str, str]:
    """Split ``path:Name`` into the path of a Python file and a name in it.

    Args:
        spec: Value of the config key, such as ``/home/me/loggers.py:Slack``.
        key: Name of the config key, for the error message.

    Raises:
        ConfigError: ``spec`` is not of this form.
    """
    path, separator, name = spec.rpartition(":")
    if not (separator and path and name.isidentifier()):
        raise ConfigError(f"{key}: got {spec!r}, expected FILE.py:Name, such as loggers.py:MyLogger")
    return path, name


def load_attribute(path: str, name: str, *, key: str) -> Any:
    """Return the function or class ``name`` of the Python file ``path``.

    The file is executed once in each process. It can import modules of its folder.

    Args:
        path: Python file; ``~`` stands for the home folder.
        name: Name that the file defines.
        key: Name of the config key, for error messages.

    Raises:
        ConfigError: The file does not exist, cannot be imported, or does not define ``name``.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}; give the path of a Python file that defines {name}")
    module_name = f"recipe_gkd_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}: {file} is not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
            del sys.modules[module_name]
            raise ConfigError(f"{key}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        public = sorted(each for each in vars(module) if not each.startswith("_"))
        raise ConfigError(f"{key}: {file} does not define {name}; it defines {', '.join(public) or 'nothing'}")
    return getattr(module, name)
