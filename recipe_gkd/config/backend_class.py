"""Teacher backend class of a user's file: ``actor_rollout_ref.teacher.backend=FILE.py:Class``."""

from __future__ import annotations

import inspect
from typing import Any

from recipe_gkd.config.keys import BACKEND
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import call_problem, load_attribute, split_spec

_REMEDY = "correct it, see recipe_gkd.teachers.backends.TeacherBackend"
_VALUE = object()
_CALLS: dict[str, tuple[str, tuple[object, ...], dict[str, object]]] = {
    "hello": ("hello(timeout_s=...)", (), {"timeout_s": _VALUE}),
    "submit": ("submit(sequences, timeout_s, temperature=...)", (_VALUE, _VALUE), {"temperature": _VALUE}),
    "close": ("close()", (), {}),
}
"""Call of each method, as text and as arguments."""


def load_backend_class(spec: str) -> type[Any]:
    """Load the class of a teacher backend and check that its constructor and its methods can be called.

    Args:
        spec: ``FILE.py:Class``.

    Raises:
        ConfigError: The file or the class does not exist, the class lacks a method, or a signature does not accept the
            arguments of `recipe_gkd.teachers.backends.TeacherBackend`.
    """
    path, name = split_spec(spec, key=BACKEND, example="my_teacher.py:MyTeacher; or zmq, http, recorded or hf")
    backend_class = load_attribute(path, name, key=BACKEND)
    expected = f"expected a class with {', '.join(_CALLS)}"
    if not isinstance(backend_class, type):
        what = f"{BACKEND}={spec}: {name} is of type {type(backend_class).__name__}; {expected}"
        raise ConfigError(what, remedy=_REMEDY, keys=(BACKEND,))
    if missing := [method for method in _CALLS if not callable(getattr(backend_class, method, None))]:
        what = f"{BACKEND}={spec}: the class has no method {', '.join(missing)}; {expected}"
        raise ConfigError(what, remedy=_REMEDY, keys=(BACKEND,))
    _check_call(spec, backend_class, f"{name}(config)", (_VALUE,), {})
    for method, (call, arguments, keywords) in _CALLS.items():
        function = getattr(backend_class, method)
        if inspect.iscoroutinefunction(function):
            what = f"{BACKEND}={spec}: {method} is a coroutine function"
            raise ConfigError(what, remedy="define it without async", keys=(BACKEND,))
        is_bound = isinstance(inspect.getattr_static(backend_class, method), staticmethod | classmethod)
        _check_call(spec, function, call, arguments if is_bound else (_VALUE, *arguments), keywords)
    return backend_class


def _check_call(
    spec: str, function: Any, call: str, arguments: tuple[object, ...], keywords: dict[str, object]
) -> None:
    if problem := call_problem(function, *arguments, **keywords):
        raise ConfigError(f"{BACKEND}={spec}: it is called as {call}: {problem}", remedy=_REMEDY, keys=(BACKEND,))
